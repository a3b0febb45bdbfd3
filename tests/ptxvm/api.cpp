#include "api.h"

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "machine.h"
#include "parse.h"
#include "statistics.h"

namespace {

using namespace ptxvm;

std::vector<std::unique_ptr<Module>>& modules() {
  static std::vector<std::unique_ptr<Module>> all;
  return all;
}

std::vector<const Kernel*> assembled_kernels() {
  std::vector<const Kernel*> all;
  for (const auto& module : modules()) {
    const auto kernels = module->assembled();
    all.insert(all.end(), kernels.begin(), kernels.end());
  }
  return all;
}

std::string& last_error() {
  static std::string error;
  return error;
}

std::recursive_mutex& one_at_a_time() {
  static std::recursive_mutex mutex;
  return mutex;
}

// -1 and a finding where the function throws.
template <class Function>
int guarded(Function&& function) {
  const std::lock_guard<std::recursive_mutex> lock(one_at_a_time());
  try {
    return function();
  } catch (const std::exception& error) {
    last_error() = error.what();
    machine().findings.report(last_error());
    return -1;
  }
}

Dimensions dimensions(const uint32_t* three) { return {three[0], three[1], three[2]}; }

}  // namespace

void ptxvm_options(int check, int statistics) {
  machine().check = check != 0;
  machine().statistics = statistics != 0;
}

void ptxvm_any_memory(int allowed) { machine().any_memory = allowed != 0; }

void ptxvm_limit(uint64_t instructions_per_block) { machine().limit = instructions_per_block; }

void ptxvm_most_blocks(uint32_t blocks) { machine().most_blocks = blocks; }

void ptxvm_device(int major, int minor, int multiprocessors) {
  Machine& m = machine();
  m.major = major, m.minor = minor, m.multiprocessors = multiprocessors;
}

void ptxvm_get_device(int* major, int* minor, int* multiprocessors) {
  const Machine& m = machine();
  *major = m.major, *minor = m.minor, *multiprocessors = m.multiprocessors;
}

void ptxvm_register(const void* begin, uint64_t bytes, int writable, const char* name) {
  machine().ranges.add(reinterpret_cast<uint64_t>(begin), bytes, writable != 0, name ? name : "");
}

void ptxvm_unregister(const void* begin) { machine().ranges.remove(reinterpret_cast<uint64_t>(begin)); }

int ptxvm_is_registered(const void* begin, uint64_t bytes) {
  return machine().any_memory || machine().ranges.find(reinterpret_cast<uint64_t>(begin), bytes) != nullptr;
}

void ptxvm_reset() {
  machine().findings.clear();
  machine().ranges.clear();
  for (const Kernel* kernel : assembled_kernels()) {
    kernel->launches = 0;
    for (const Instruction& instruction : kernel->code) instruction.counters = Counters();
  }
}

const char* ptxvm_findings() {
  static std::string text;
  text = machine().findings.text();
  return text.c_str();
}

const char* ptxvm_not_launched() {
  static std::string text;
  text.clear();
  for (const auto& module : modules()) {
    if (module->architecture() != 10 * machine().major + machine().minor) continue;
    std::set<std::string> launched;
    for (const Kernel* kernel : module->assembled()) {
      if (kernel->launches) launched.insert(kernel->name);
    }
    for (const std::string& name : module->names()) {
      if (!launched.count(name)) text += name + "\n";
    }
  }
  return text.c_str();
}

void ptxvm_finding(const char* message) { machine().findings.report(message); }

const char* ptxvm_statistics() {
  static std::string text;
  text = statistics_json(assembled_kernels());
  return text.c_str();
}

uint64_t ptxvm_executed() { return machine().executed; }

int ptxvm_load(const char* text, uint64_t length) {
  return guarded([&] {
    modules().push_back(std::make_unique<Module>(std::string(text, length)));
    return int(modules().size()) - 1;
  });
}

const char* ptxvm_unknown() {
  static std::string text;
  text.clear();
  for (const auto& module : modules()) {
    for (const std::string& name : module->names()) {
      const int result = guarded([&] {
        for (const Source& source : module->kernel(name).sources) {
          if (!source.problem.empty()) text += source.where + " [" + source.text + "]: " + source.problem + "\n";
        }
        return 0;
      });
      if (result < 0) text += name + ": " + last_error() + "\n";
    }
  }
  return text.c_str();
}

int ptxvm_architecture(int module) { return modules().at(size_t(module))->architecture(); }

int ptxvm_has_kernel(int module, const char* kernel) { return modules().at(size_t(module))->has(kernel); }

int ptxvm_parameter(int module, const char* kernel, int number, uint32_t* offset, uint32_t* size) {
  return guarded([&] {
    const auto& parameters = modules().at(size_t(module))->kernel(kernel).parameters;
    if (size_t(number) >= parameters.size()) return 0;
    *offset = parameters[size_t(number)].offset;
    *size = parameters[size_t(number)].size;
    return 1;
  });
}

int ptxvm_limits(int module, const char* kernel, uint32_t* static_shared, uint32_t* max_threads) {
  return guarded([&] {
    const Kernel& found = modules().at(size_t(module))->kernel(kernel);
    *static_shared = found.static_shared;
    *max_threads = found.max_threads;
    return 0;
  });
}

int ptxvm_launch(int module, const char* kernel, const uint32_t* grid, const uint32_t* block, uint32_t dynamic_shared,
                 const void* parameters) {
  return guarded([&] {
    launch(modules().at(size_t(module))->kernel(kernel), dimensions(grid), dimensions(block), dynamic_shared,
           parameters);
    return 0;
  });
}

const char* ptxvm_error() { return last_error().c_str(); }
