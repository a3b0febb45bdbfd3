// What Python and the stand-in runtime call. Launches of several threads wait for each other; texts stay valid until
// the next call of the same function.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Checks and access statistics on or off. Checks are on at the start.
void ptxvm_options(int check, int statistics);
// Lets kernels touch memory that is not registered, and that nobody checks then: where the code under test allocates.
void ptxvm_any_memory(int allowed);
// After so many instructions (of whole warps) a block is taken to loop for ever. 2^28, about ten seconds, at the start.
void ptxvm_limit(uint64_t instructions_per_block);
// Grids of kernels that read gridDim.x, and so are right for any number of blocks, become no larger than that in x:
// their loops over blocks turn more often, and what one turn leaves for the next to stumble over is found.
void ptxvm_most_blocks(uint32_t blocks);
// What cudaDeviceGetAttribute says, and which PTX is taken where a program has several.
void ptxvm_device(int major, int minor, int multiprocessors);
void ptxvm_get_device(int* major, int* minor, int* multiprocessors);

// Global memory that kernels may touch. The name is for messages.
void ptxvm_register(const void* begin, uint64_t bytes, int writable, const char* name);
void ptxvm_unregister(const void* begin);
int ptxvm_is_registered(const void* begin, uint64_t bytes);

// Forgets findings, statistics, launches and registered memory.
void ptxvm_reset(void);
// Kernels for the device's architecture that have not been launched since, one a line.
const char* ptxvm_not_launched(void);
// One finding a line; empty: none.
const char* ptxvm_findings(void);
void ptxvm_finding(const char* message);
const char* ptxvm_statistics(void);  // JSON, see statistics.h
uint64_t ptxvm_executed(void);       // instructions (of whole warps) since the start

// A module of PTX text: returns its number, or -1. ptxvm_error says what was wrong.
int ptxvm_load(const char* text, uint64_t length);
// One line for each instruction of all loaded kernels that cannot be executed; empty: none.
const char* ptxvm_unknown(void);
int ptxvm_architecture(int module);
int ptxvm_has_kernel(int module, const char* kernel);
// 1, and offset and size of a parameter. 0: there is no such parameter. -1: the kernel cannot be read.
int ptxvm_parameter(int module, const char* kernel, int number, uint32_t* offset, uint32_t* size);
// Shared memory that the kernel declares, and the most threads a block may have. 0, or -1: the kernel cannot be read.
int ptxvm_limits(int module, const char* kernel, uint32_t* static_shared, uint32_t* max_threads);
// 0, or -1 if the launch ended by a fault, which is a finding too. `grid` and `block` have three elements.
int ptxvm_launch(int module, const char* kernel, const uint32_t* grid, const uint32_t* block, uint32_t dynamic_shared,
                 const void* parameters);
const char* ptxvm_error(void);

#ifdef __cplusplus
}
#endif
