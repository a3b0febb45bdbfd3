// Transposes of square blocks held in registers, baseline. lane_sums(r): lane i is the sum of the lanes of r[i].

MHA_INLINE void transpose(FloatVec (&r)[4]) {
  const FloatVec a = r[0], b = r[1], c = r[2], d = r[3];
  for (int i = 0; i < 4; ++i) r[i] = FloatVec{a[i], b[i], c[i], d[i]};
}
MHA_INLINE void transpose(DoubleVec (&r)[2]) {
  const DoubleVec a = r[0], b = r[1];
  for (int i = 0; i < 2; ++i) r[i] = DoubleVec{a[i], b[i]};
}

MHA_INLINE FloatVec lane_sums(FloatVec (&r)[4]) {
  transpose(r);
  return (r[0] + r[1]) + (r[2] + r[3]);
}
MHA_INLINE DoubleVec lane_sums(DoubleVec (&r)[2]) {
  transpose(r);
  return r[0] + r[1];
}
