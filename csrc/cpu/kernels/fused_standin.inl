// Stand-in until the forward splits keys.
template <class T>
struct FusedMergeKernel {
  static int64_t tasks(const FusedForward&) { return 0; }
  static void run(const FusedForward&, int64_t, int64_t) {}
};
