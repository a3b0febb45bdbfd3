// PTX text as nvcc writes it: variables, entries, source positions. Kernels are assembled when they are first asked
// for.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "assemble.h"
#include "program.h"

namespace ptxvm {

class Module {
 public:
  explicit Module(const std::string& text);
  ~Module();
  int architecture() const { return architecture_; }  // 80 for sm_80
  bool has(const std::string& kernel) const { return entries_.count(kernel) != 0; }
  std::vector<std::string> names() const;
  Kernel& kernel(const std::string& name);
  std::vector<const Kernel*> assembled() const;

 private:
  struct Lines {
    size_t begin, end;
  };
  size_t read_top_level(size_t line);
  size_t read_entry(size_t line);
  void declare_variable(const std::string& statement);

  std::vector<std::string> lines_;  // without comments
  std::map<int, std::string> files_;
  std::map<std::string, Lines> entries_;
  std::map<std::string, Symbol> symbols_;
  uint32_t shared_bytes_ = 0, dynamic_shared_alignment_ = 16;  // of the module's own shared variables
  std::deque<std::vector<uint64_t>> variables_;
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
  int architecture_ = 0;
};

// ".shared .align 16 .b8 name[1024]" and the like.
struct Declaration {
  std::string space, type, name, initialiser;
  uint32_t alignment = 0, count = 1;
  bool is_extern = false;
  uint32_t bytes() const;
};
Declaration read_declaration(const std::string& statement);

// Source positions: .loc says file and line, and where that was inlined.
class Locations {
 public:
  explicit Locations(const std::map<int, std::string>& files) : files_(files) {}
  void read(const std::string& directive);
  const std::string& where() const { return where_; }

 private:
  using Position = std::pair<int, int>;  // file, line
  std::string text(Position position) const;
  const std::map<int, std::string>& files_;
  std::map<Position, Position> parents_;  // where nvcc last inlined the code of a line
  std::string where_ = "unknown line";
};

// The body of a kernel, statement by statement.
void read_body(const std::string& body, Assembler& assembler, Kernel& kernel, Locations& locations);

}  // namespace ptxvm
