#include "parse.h"

#include <algorithm>
#include <sstream>

#include "machine.h"

namespace ptxvm {
namespace {

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

uint32_t aligned(uint32_t offset, uint32_t alignment) { return (offset + alignment - 1) / alignment * alignment; }

std::vector<std::string> read_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(trimmed(line.substr(0, line.find("//"))));
  return lines;
}

// "{1, 2, 3}" or "5" as elements of `size` bytes; missing ones are 0.
std::vector<uint64_t> initial_value(const Declaration& declaration) {
  std::vector<uint64_t> memory(declaration.bytes() / 8 + 1);
  const uint32_t size = declaration.bytes() / declaration.count;
  uint8_t* to = reinterpret_cast<uint8_t*>(memory.data());
  for (const std::string& element : vector_elements(declaration.initialiser)) {
    if (element.empty()) break;
    const uint64_t value = literal_bits(element);
    std::memcpy(to, &value, size);
    to += size;
  }
  return memory;
}

}  // namespace

uint32_t Declaration::bytes() const { return count * (type == "pred" ? 1 : type_bytes(type)); }

Declaration read_declaration(const std::string& statement) {
  Declaration declaration;
  const size_t equals = statement.find('=');
  if (equals != std::string::npos) declaration.initialiser = trimmed(statement.substr(equals + 1));
  std::istringstream words(statement.substr(0, equals));
  bool of_pointer = false;  // ".ptr .global .align 16" speaks of what a parameter points to
  for (std::string word; words >> word;) {
    if (word == ".align") {
      uint32_t alignment = 1;
      words >> alignment;
      if (!of_pointer) declaration.alignment = alignment;
    } else if (word == ".ptr") {
      of_pointer = true;
    } else if (word == ".extern") {
      declaration.is_extern = true;
    } else if (word == ".global" || word == ".const" || word == ".shared" || word == ".local" || word == ".param") {
      if (!of_pointer) declaration.space = word.substr(1);
    } else if (word[0] == '.' && word != ".visible" && word != ".weak" && word != ".common") {
      declaration.type = word.substr(1);
    } else if (word[0] != '.') {
      declaration.name += word;
    }
  }
  const size_t bracket = declaration.name.find('[');
  for (size_t at = bracket; at != std::string::npos; at = declaration.name.find('[', at + 1)) {
    declaration.count *= uint32_t(std::atoi(declaration.name.c_str() + at + 1));  // "[]" counts 0
  }
  declaration.name = declaration.name.substr(0, bracket);
  if (!declaration.alignment) declaration.alignment = declaration.type.empty() ? 1 : type_bytes(declaration.type);
  return declaration;
}

// ---- Source positions
// ------------------------------------------------------------------------------------------------

std::string Locations::text(Position position) const {
  const auto file = files_.find(position.first);
  const std::string path = file == files_.end() ? "?" : file->second;
  return path.substr(path.find_last_of('/') + 1) + ":" + std::to_string(position.second);
}

void Locations::read(const std::string& directive) {
  int file = 0, line = 0;
  std::sscanf(directive.c_str(), ".loc %d %d", &file, &line);
  const Position here{file, line};
  const size_t inlined = directive.find("inlined_at");
  if (inlined == std::string::npos) {
    where_ = text(here);
    return;
  }
  Position parent;
  std::sscanf(directive.c_str() + inlined, "inlined_at %d %d", &parent.first, &parent.second);
  parents_[here] = parent;
  where_ = text(here) + " (inlined at " + text(parent);
  // The chain of callers: each was written before the lines inlined there. A recursive template may make it a ring.
  for (int depth = 0; depth < 8; ++depth) {
    const auto next = parents_.find(parent);
    if (next == parents_.end()) break;
    parent = next->second;
    where_ += ", " + text(parent);
  }
  where_ += ")";
}

// ---- Modules
// ---------------------------------------------------------------------------------------------------------

Module::Module(const std::string& text) : lines_(read_lines(text)) {
  for (size_t line = 0; line < lines_.size();) line = read_top_level(line);
}

Module::~Module() {
  for (const auto& memory : variables_) machine().variables.remove(reinterpret_cast<uint64_t>(memory.data()));
}

// Each of these returns the line after what it has read.
size_t Module::read_top_level(size_t line) {
  const std::string& text = lines_[line];
  if (text.find(".entry ") != std::string::npos) return read_entry(line);
  if (starts_with(text, ".target")) {
    const size_t number = text.find("sm_");
    if (number != std::string::npos) architecture_ = std::atoi(text.c_str() + number + 3);
  } else if (starts_with(text, ".file")) {
    const size_t quote = text.find('"');
    files_[std::atoi(text.c_str() + 5)] = text.substr(quote + 1, text.find('"', quote + 1) - quote - 1);
  } else if (text.find(".global ") != std::string::npos || text.find(".const ") != std::string::npos ||
             text.find(".shared ") != std::string::npos) {
    std::string statement = text;
    while (statement.find(';') == std::string::npos && line + 1 < lines_.size()) statement += " " + lines_[++line];
    declare_variable(statement.substr(0, statement.find(';')));
  } else if (starts_with(text, ".section")) {
    return lines_.size();  // debug information, at the end
  }
  return line + 1;
}

size_t Module::read_entry(size_t line) {
  std::string name = trimmed(lines_[line].substr(lines_[line].find(".entry ") + 7));
  name = name.substr(0, name.find_first_of("( "));
  const size_t begin = line;
  int depth = 0;
  bool inside = false;
  for (; line < lines_.size() && (!inside || depth > 0); ++line) {
    for (char c : lines_[line]) depth += (c == '{') - (c == '}');
    inside |= depth > 0;
  }
  entries_[name] = {begin, line};
  return line;
}

void Module::declare_variable(const std::string& statement) {
  const Declaration declaration = read_declaration(statement);
  if (declaration.space == "shared") {
    if (declaration.is_extern) {
      symbols_[declaration.name] = {Symbol::Kind::dynamic_shared, 0};
      dynamic_shared_alignment_ = std::max(dynamic_shared_alignment_, declaration.alignment);
    } else {
      shared_bytes_ = aligned(shared_bytes_, declaration.alignment);
      symbols_[declaration.name] = {Symbol::Kind::shared, shared_bytes_};
      shared_bytes_ += declaration.bytes();
    }
    return;
  }
  variables_.push_back(initial_value(declaration));
  const uint64_t address = reinterpret_cast<uint64_t>(variables_.back().data());
  symbols_[declaration.name] = {Symbol::Kind::absolute, address};
  machine().variables.add(address, declaration.bytes(), declaration.space != "const", declaration.name);
}

std::vector<std::string> Module::names() const {
  std::vector<std::string> all;
  for (const auto& entry : entries_) all.push_back(entry.first);
  return all;
}

std::vector<const Kernel*> Module::assembled() const {
  std::vector<const Kernel*> all;
  for (const auto& kernel : kernels_) all.push_back(kernel.second.get());
  return all;
}

static void declare_parameters(const std::string& header, Kernel& kernel, Assembler& assembler) {
  const size_t open = header.find('('), close = header.rfind(')');
  if (open == std::string::npos || close == std::string::npos) return;
  for (const std::string& text : split_operands(header.substr(open + 1, close - open - 1))) {
    const Declaration declaration = read_declaration(text);
    const uint32_t offset = aligned(kernel.parameter_bytes, declaration.alignment);
    kernel.parameters.push_back({declaration.name, offset, declaration.bytes()});
    kernel.parameter_bytes = offset + declaration.bytes();
  }
  kernel.parameter_memory.resize(kernel.parameter_bytes / 8 + 2);
  const uint64_t base = reinterpret_cast<uint64_t>(kernel.parameter_memory.data());
  for (const Parameter& parameter : kernel.parameters) {
    assembler.declare_symbol(parameter.name, {Symbol::Kind::absolute, base + parameter.offset});
  }
}

// ".maxntid 128, 1, 1": what __launch_bounds__ says.
static uint32_t max_threads(const std::string& header) {
  const size_t at = header.find(".maxntid");
  uint32_t x = 1024, y = 1, z = 1;
  if (at != std::string::npos) std::sscanf(header.c_str() + at, ".maxntid %u, %u, %u", &x, &y, &z);
  return x * y * z;
}

Kernel& Module::kernel(const std::string& name) {
  std::unique_ptr<Kernel>& known = kernels_[name];
  if (known) return *known;
  auto kernel = std::make_unique<Kernel>();
  kernel->name = name;
  kernel->static_shared = shared_bytes_;
  kernel->dynamic_shared_alignment = dynamic_shared_alignment_;
  std::string text;
  const Lines& lines = entries_.at(name);
  for (size_t line = lines.begin; line < lines.end; ++line) text += lines_[line] + "\n";
  const size_t open = text.find('{'), close = text.rfind('}');
  Assembler assembler(*kernel);
  for (const auto& [symbol_name, symbol] : symbols_) assembler.declare_symbol(symbol_name, symbol);
  declare_parameters(text.substr(0, open), *kernel, assembler);
  kernel->max_threads = max_threads(text.substr(0, open));
  Locations locations(files_);
  read_body(text.substr(open + 1, close - open - 1), assembler, *kernel, locations);
  assembler.finish();
  known = std::move(kernel);
  return *known;
}

}  // namespace ptxvm
