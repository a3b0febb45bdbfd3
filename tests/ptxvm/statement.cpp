// Splitting a statement of PTX into its parts.
#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "assemble.h"

namespace ptxvm {

std::string trimmed(const std::string& text) {
  const char* space = " \t\r\n";
  const size_t begin = text.find_first_not_of(space);
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(space) - begin + 1);
}

std::vector<std::string> split_operands(const std::string& text) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (char c : text) {
    depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
    if (c == ',' && depth == 0) {
      parts.push_back(trimmed(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trimmed(part).empty()) parts.push_back(trimmed(part));
  return parts;
}

std::vector<std::string> vector_elements(const std::string& text) {
  if (text.empty() || text.front() != '{') return {text};
  return split_operands(text.substr(1, text.size() - 2));
}

bool Statement::has(const char* modifier) const {
  return std::find(modifiers.begin(), modifiers.end(), modifier) != modifiers.end();
}

Statement read_statement(const std::string& text) {
  Statement statement;
  statement.text = text;
  std::string rest = trimmed(text);
  const auto take_word = [&] {
    const size_t end = std::min(rest.find_first_of(" \t\n"), rest.size());
    const std::string word = rest.substr(0, end);
    rest = trimmed(rest.substr(end));
    return word;
  };
  if (rest.front() == '@') {
    statement.guard = take_word().substr(1);
    statement.guard_negated = statement.guard.front() == '!';
    if (statement.guard_negated) statement.guard.erase(0, 1);
  }
  statement.opcode = take_word();
  std::stringstream opcode(statement.opcode);
  for (std::string part; std::getline(opcode, part, '.');) statement.modifiers.push_back(part);
  statement.operands = split_operands(rest);
  return statement;
}

uint64_t literal_bits(const std::string& text) {
  const bool exact_float = text[0] == '0' && (text[1] == 'f' || text[1] == 'F' || text[1] == 'd' || text[1] == 'D');
  if (exact_float) return std::strtoull(text.c_str() + 2, nullptr, 16);
  if (text[0] == '-') return uint64_t(std::strtoll(text.c_str(), nullptr, 0));
  return std::strtoull(text.c_str(), nullptr, 0);
}

uint32_t type_bytes(const std::string& type) {
  if (type == "bf16") return 2;
  const int bits = type.size() > 1 ? std::atoi(type.c_str() + 1) : 0;
  if (bits < 8 || bits > 64) throw Unknown("type " + type);
  return uint32_t(bits) / 8;
}

Space space_of(const Statement& statement) {
  for (const std::string& modifier : statement.modifiers) {
    if (modifier == "global") return Space::global;
    if (modifier == "local") return Space::local;
    if (modifier == "param" || modifier.rfind("param::", 0) == 0) return Space::param;
    if (modifier == "const") return Space::constant;
    if (modifier == "shared" || modifier.rfind("shared::", 0) == 0) return Space::shared;
  }
  return Space::generic;
}

}  // namespace ptxvm
