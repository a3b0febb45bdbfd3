// The sizes that the products are cut into. Figures: one core of an Intel Emerald Rapids (48 KB first-level and 2 MB
// second-level cache), 512 queries, 512 keys, head_dim 64; "in cache": one such matrix again and again, else 96 of them
// (docs/tuning_log.md says more).

// A tile of the output stays in registers while the depth runs: tile_rows(v) rows of v vectors. Of 32 registers 24 are
// sums, which hides the latency of the FMA (4 cycles, 2 per cycle) threefold and leaves room for v vectors of B and a
// broadcast of A; of 16 registers 12 are sums. Panels of 4 vectors against 3 and 2, in cache: scores 97, 94, 91 GF/s.
// For double 2 are enough: 94 % of the rate, and a sixth of all code less.
template <class Acc>
constexpr int kPanelVectors = kRegisters == 32 && sizeof(Acc) == 4 ? 4 : 2;
constexpr int tile_rows(int vectors) {
  if (kRegisters == 32) return vectors == 4 ? 6 : vectors == 3 ? 8 : 12;
  return 6;
}

// Packed columns of A^T come in groups of three vectors: every tile_rows() divides 3 * lanes.
template <class Acc>
constexpr int kPackedRows = 3 * kLanes<Acc>;

// Depth of a block, in elements. Sums over a block are added up afterwards, which keeps long sums accurate: 256 terms
// in a row, then as many partial sums as there are blocks. A panel of B is at most 64 KB deep.
constexpr int64_t kBlockOfDepth = 256;
// AMX needs fewer passes over the partial sums more than a short panel: 1024 against 256, weighted_sum in cache 395 and
// 367 GF/s; 512 measured about the same as 1024 and packs half as much of A^T at once.
constexpr int64_t kTileBlockOfDepth = 512;
// Rows of A^T that are packed together: each is read in one go (against whole columns of groups, f32 89 -> 95 GF/s).
constexpr int64_t kPackDepth = 16;
// Depth for which the rows of the next tile are prefetched at a time: four lines of float per row. Serves an A
// that is read once: f32 weighted_sum 118 -> 125 GF/s; nothing gained where the rows meet several panels.
constexpr int64_t kPrefetchDepth = 64;

// One task: rows x columns of one matrix of the batch. B is packed once per task, so a task has many rows: with 512 of
// them packing is about 7 % of the time of f32 scores (sampled), with 64 rows it was 12 %.
constexpr int64_t kRowBlock = 512, kColBlock = 1024;
constexpr int64_t kRowBlockMin = 64, kColBlockMin = 128;
// Columns of a task whose depth has several blocks: 512 x 256 sums of 4 bytes fit the second-level cache.
constexpr int64_t kColBlockDeep = 256;
// A product is cut into this many tasks, four each for four threads, unless a task would hold less than kTaskWork
// operations (about 20 microseconds).
constexpr int64_t kTasks = 16;
constexpr double kTaskWork = 2e6;
// Blocks are whole numbers of these: of tiles, of vectors (64 columns are a panel of four), of pairs and tiles of
// pairs.
constexpr int64_t kRowStep = 32, kColStep = 64, kDepthStep = 32;

constexpr int kCacheLine = 64;
// Outputs from this size on bypass the caches: they outgrow the second-level cache of a few cores before anyone reads
// them. Writing 100 MB runs at 16 GB/s instead of 7 (1 thread); f32 scores on two threads 43.5 -> 64 GF/s, measured
// only while other work kept the memory busy.
constexpr int64_t kStreamBytes = 8 << 20;
