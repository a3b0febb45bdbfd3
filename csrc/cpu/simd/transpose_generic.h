// Transposes of square blocks held in registers, baseline.

MHA_INLINE void transpose(FloatVec (&r)[4]) {
  const FloatVec a = r[0], b = r[1], c = r[2], d = r[3];
  for (int i = 0; i < 4; ++i) r[i] = FloatVec{a[i], b[i], c[i], d[i]};
}
MHA_INLINE void transpose(DoubleVec (&r)[2]) {
  const DoubleVec a = r[0], b = r[1];
  for (int i = 0; i < 2; ++i) r[i] = DoubleVec{a[i], b[i]};
}
