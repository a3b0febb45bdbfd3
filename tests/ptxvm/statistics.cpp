#include "statistics.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace ptxvm {

constexpr int kBanks = 32;

// Wavefronts of one pass: the most different words in any bank.
static uint64_t wavefronts(const uint64_t* address, uint32_t lanes, uint32_t bytes) {
  uint64_t words[kBanks][kLanes];
  int count[kBanks] = {}, most = 0;
  for (; lanes; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    for (uint64_t word = address[lane] / 4; word <= (address[lane] + bytes - 1) / 4; ++word) {
      const int bank = int(word % kBanks);
      if (std::find(words[bank], words[bank] + count[bank], word) != words[bank] + count[bank]) continue;  // broadcast
      words[bank][count[bank]++] = word;
      most = std::max(most, count[bank]);
    }
  }
  return uint64_t(most);
}

void count_shared(const Instruction& instruction, const uint64_t* address, uint32_t lanes, uint32_t bytes) {
  Counters& counters = instruction.counters;
  ++counters.requests;
  const int together = bytes >= 16 ? 8 : bytes == 8 ? 16 : 32;
  for (int first = 0; first < kLanes; first += together) {
    const uint32_t pass = lanes & (together == kLanes ? kAllLanes : ((1u << together) - 1) << first);
    counters.wavefronts += wavefronts(address, pass, bytes);
    counters.ideal_wavefronts += pass != 0;
  }
}

void count_global(const Instruction& instruction, const uint64_t* address, uint32_t lanes, uint32_t bytes) {
  constexpr uint64_t kSector = 32;
  Counters& counters = instruction.counters;
  ++counters.requests;
  std::vector<uint64_t> sectors;
  uint64_t first = ~uint64_t{0}, last = 0;
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const uint64_t begin = address[__builtin_ctz(rest)], end = begin + bytes;
    for (uint64_t sector = begin / kSector; sector <= (end - 1) / kSector; ++sector) sectors.push_back(sector);
    first = std::min(first, begin), last = std::max(last, end);
  }
  std::sort(sectors.begin(), sectors.end());
  counters.sectors += uint64_t(std::unique(sectors.begin(), sectors.end()) - sectors.begin());
  // Lanes may read the same bytes: then the bytes between the first and the last are fewer than the lanes ask for.
  const uint64_t asked = std::min(uint64_t(__builtin_popcount(lanes)) * bytes, last - first);
  counters.ideal_sectors += (asked + kSector - 1) / kSector;
}

static std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c == '\n' || c == '\t' ? ' ' : c;
  }
  return result + "\"";
}

std::string statistics_json(const std::vector<const Kernel*>& kernels) {
  std::map<std::tuple<std::string, std::string, std::string>, Counters> lines;
  for (const Kernel* kernel : kernels) {
    for (const Instruction& instruction : kernel->code) {
      const Counters& add = instruction.counters;
      if (!add.requests) continue;
      const std::string opcode = instruction.source->text.substr(0, instruction.source->text.find_first_of(" \t"));
      Counters& sum = lines[{kernel->name, instruction.source->where, opcode}];
      sum.requests += add.requests;
      sum.wavefronts += add.wavefronts;
      sum.ideal_wavefronts += add.ideal_wavefronts;
      sum.sectors += add.sectors;
      sum.ideal_sectors += add.ideal_sectors;
    }
  }
  std::string json = "[";
  for (const auto& [key, sum] : lines) {
    const auto& [kernel, where, opcode] = key;
    if (json.size() > 1) json += ",\n ";
    json += "{\"kernel\": " + quoted(kernel) + ", \"where\": " + quoted(where) + ", \"opcode\": " + quoted(opcode) +
            ", \"requests\": " + std::to_string(sum.requests) + ", \"wavefronts\": " + std::to_string(sum.wavefronts) +
            ", \"ideal_wavefronts\": " + std::to_string(sum.ideal_wavefronts) +
            ", \"sectors\": " + std::to_string(sum.sectors) +
            ", \"ideal_sectors\": " + std::to_string(sum.ideal_sectors) + "}";
  }
  return json + "]";
}

}  // namespace ptxvm
