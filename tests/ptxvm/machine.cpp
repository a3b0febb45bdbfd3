#include "machine.h"

namespace ptxvm {

Machine the_machine;

static std::string place(const Source& source) { return source.where + " [" + source.text + "]"; }

void fault(const Instruction& instruction, const std::string& message) {
  throw Fault(message + " at " + place(*instruction.source));
}

std::string Findings::text() const {
  std::string all;
  for (const auto& [key, entry] : entries_) {
    const auto& [kind, source] = key;
    all += kind;
    if (source) all += " at " + place(*source);
    if (!entry.details.empty()) all += ": " + entry.details;
    if (entry.times > 1) all += " (the first of " + std::to_string(entry.times) + ")";
    all += "\n";
  }
  return all;
}

}  // namespace ptxvm
