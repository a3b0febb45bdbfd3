// The statements between a kernel's braces.
#include <algorithm>

#include "parse.h"

namespace ptxvm {
namespace {

char register_letter(const std::string& type) {
  if (type == "pred") return 'p';
  switch (type_bytes(type)) {
    case 1: return 'b';
    case 2: return 'h';
    case 4: return 'w';
    default: return 'd';
  }
}

// ".reg .b32 %r<76>" declares %r0 to %r75; ".reg .pred p, q" two.
void declare_registers(const std::string& statement, Assembler& assembler) {
  const size_t type_begin = statement.find('.', 4) + 1, type_end = statement.find_first_of(" \t", type_begin);
  const char type = register_letter(statement.substr(type_begin, type_end - type_begin));
  for (const std::string& name : split_operands(statement.substr(type_end))) {
    const size_t bracket = name.find('<');
    if (bracket == std::string::npos) {
      assembler.declare_register(name, type);
      continue;
    }
    const int count = std::atoi(name.c_str() + bracket + 1);
    for (int i = 0; i < count; ++i) assembler.declare_register(name.substr(0, bracket) + std::to_string(i), type);
  }
}

void declare_in_body(const std::string& statement, Assembler& assembler, Kernel& kernel) {
  const bool shared = statement.rfind(".shared", 0) == 0;
  if (!shared && statement.rfind(".local", 0) != 0) return;  // .param of a call, .pragma
  const Declaration declaration = read_declaration(statement);
  uint32_t& end = shared ? kernel.static_shared : kernel.local_bytes;
  end = (end + declaration.alignment - 1) / declaration.alignment * declaration.alignment;
  assembler.declare_symbol(declaration.name, {shared ? Symbol::Kind::shared : Symbol::Kind::local, end});
  end += declaration.bytes();
}

void take_statement(const std::string& statement, Assembler& assembler, Kernel& kernel, const Locations& locations) {
  if (statement.rfind(".reg", 0) == 0) {
    declare_registers(statement, assembler);
  } else if (statement[0] == '.') {
    declare_in_body(statement, assembler, kernel);
  } else {
    assembler.instruction(statement, locations.where());
  }
}

// Length of "name" in "name: ..."; 0 if the text does not start with a label.
size_t label_length(const std::string& body, size_t at) {
  size_t end = at;
  while (end < body.size() && (isalnum(body[end]) || body[end] == '_' || body[end] == '$' || body[end] == '%')) ++end;
  const bool is_label = end > at && end < body.size() && body[end] == ':' && body.compare(end, 2, "::") != 0;
  return is_label ? end - at : 0;
}

}  // namespace

void read_body(const std::string& body, Assembler& assembler, Kernel& kernel, Locations& locations) {
  size_t at = 0;
  std::string label;  // the last one: a branch table is named by it
  while ((at = body.find_first_not_of(" \t\n;", at)) != std::string::npos) {
    if (body[at] == '{' || body[at] == '}') {
      body[at++] == '{' ? assembler.open_scope() : assembler.close_scope();
    } else if (const size_t length = label_length(body, at)) {
      label = body.substr(at, length);
      assembler.label(label);
      at += length + 1;
    } else if (body.compare(at, 4, ".loc") == 0 && isspace(body[at + 4])) {
      const size_t end = std::min(body.find('\n', at), body.size());
      locations.read(body.substr(at, end - at));
      at = end;
    } else {
      const size_t end = std::min(body.find(';', at), body.size());
      std::string statement = trimmed(body.substr(at, end - at));
      std::replace_if(statement.begin(), statement.end(), [](char c) { return isspace(c); }, ' ');
      if (statement.rfind(".branchtargets", 0) == 0) {
        assembler.branch_table(label, split_operands(statement.substr(14)));
      } else {
        take_statement(statement, assembler, kernel, locations);
      }
      at = end;
    }
  }
  kernel.local_bytes = (kernel.local_bytes + 15) / 16 * 16;
}

}  // namespace ptxvm
