// Vectors spread evenly over panels of at most kPanelVectors: 13 = 3 + 3 + 3 + 4.
struct PanelSpread {
  int64_t vectors, panels;

  template <class Acc>
  static PanelSpread of(int64_t lanes) {
    const int64_t vectors = ceil_div(lanes, kLanes<Acc>);
    return {vectors, ceil_div(vectors, kPanelVectors<Acc>)};
  }
  int64_t first_vector(int64_t panel) const { return vectors * panel / max_of(1, panels); }
};

template <int N>
struct Vectors {
  static constexpr int count = N;
};

// f(Vectors<n>): from a number known at run time to one known at compile time.
template <class Acc, class F>
MHA_INLINE void with_vectors(int64_t vectors, F&& f) {
  switch (vectors) {
    case 1: return f(Vectors<1>{});
    case 2: return f(Vectors<2>{});
    case 3:
      if constexpr (kPanelVectors<Acc> >= 3) return f(Vectors<3>{});
      break;
    case 4:
      if constexpr (kPanelVectors<Acc> >= 4) return f(Vectors<4>{});
      break;
  }
  __builtin_unreachable();  // panels are never wider
}
