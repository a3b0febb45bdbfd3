// Per-thread working memory of the kernels: grown on demand, kept for the thread's life, so that a call costs no
// allocation once warm.
#pragma once
#include <cstddef>

namespace mha::cpu {

// At least `bytes` bytes, aligned to 64, valid until the thread's next call of scratch(). Throws
// std::bad_alloc when memory is out: torch's parallel_for turns that into a RuntimeError.
void* scratch(std::size_t bytes);

// Another buffer of the same kind, valid until the thread's next call of kept_scratch(): for sums that several rounds
// of work, each with its own scratch(), add to.
void* kept_scratch(std::size_t bytes);

}  // namespace mha::cpu
