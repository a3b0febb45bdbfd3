// How a product is cut into tasks. Follows from the problem alone, so results do not depend on the thread count.

struct ProductSplit {
  int64_t row_block, row_blocks, col_block, col_blocks, depth_block, depth_blocks;

  static ProductSplit of(const Product& p, int64_t max_depth) {
    ProductSplit s;
    s.depth_blocks = max_of(1, ceil_div(p.k, max_depth));
    s.depth_block = round_up(ceil_div(p.k, s.depth_blocks), kDepthStep);
    s.row_blocks = ceil_div(p.m, kRowBlock);
    s.col_blocks = ceil_div(p.n, s.depth_blocks * p.groups > 1 ? kColBlockDeep : kColBlock);
    s.cut_further(p);
    s.row_block = round_up(ceil_div(p.m, max_of(1, s.row_blocks)), kRowStep);
    s.col_block = round_up(ceil_div(p.n, max_of(1, s.col_blocks)), kColStep);
    s.row_blocks = ceil_div(p.m, max_of(1, s.row_block));  // rounding up may have made the last block superfluous
    s.col_blocks = ceil_div(p.n, max_of(1, s.col_block));
    return s;
  }

  // A small batch: smaller blocks, so that all threads have work. Columns are cut first: every block of rows packs B
  // again, while A often needs no packing (one f32 matrix of scores: +6 %).
  void cut_further(const Product& p) {
    const int64_t tasks = p.batch.count() * row_blocks * col_blocks;
    const int64_t wanted = min_of(kTasks, static_cast<int64_t>(p.work() / kTaskWork));
    if (tasks == 0 || tasks >= wanted) return;
    const int64_t cols = max_of(1, min_of(ceil_div(wanted, tasks), p.n / (col_blocks * kColBlockMin)));
    col_blocks *= cols;
    const int64_t rows = max_of(1, min_of(ceil_div(wanted, tasks * cols), p.m / (row_blocks * kRowBlockMin)));
    row_blocks *= rows;
  }

  int64_t in_entry() const { return row_blocks * col_blocks; }
};
