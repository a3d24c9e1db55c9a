// Reads PTX: declarations, scopes with registers and labels of their own, instructions.
#include "ptx.h"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace emulator {

namespace {

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%'; }

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return text;
}

// "a, {b, c}, [d, {e}]" at its outer commas.
std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    char const c = i < text.size() ? text[i] : ',';
    if (c == '{' || c == '[' || c == '(') ++depth;
    if (c == '}' || c == ']' || c == ')') --depth;
    if (c != ',' || (depth > 0 && i < text.size())) continue;
    if (auto const part = trimmed(text.substr(begin, i - begin)); !part.empty()) parts.push_back(part);
    begin = i + 1;
  }
  return parts;
}

std::map<std::string_view, Special> const kSpecials = {
    {"%tid.x", Special::kTidX},
    {"%ntid.x", Special::kNtidX},
    {"%ctaid.x", Special::kCtaidX},
    {"%nctaid.x", Special::kNctaidX},
    {"%cluster_ctarank", Special::kClusterCtarank},
    {"%cluster_nctarank", Special::kClusterNctarank},
    {"%cluster_ctaid.x", Special::kClusterCtarank},
    {"%clusterid.x", Special::kClusteridX},
    {"%nclusterid.x", Special::kNclusteridX},
    {"%laneid", Special::kLaneid},
    {"%tid.y", Special::kZero},
    {"%tid.z", Special::kZero},
    {"%ctaid.y", Special::kZero},
    {"%ctaid.z", Special::kZero},
    {"%clusterid.y", Special::kZero},
    {"%clusterid.z", Special::kZero},
    {"%nclusterid.y", Special::kOne},
    {"%nclusterid.z", Special::kOne},
};

std::uint64_t number(std::string_view text) {
  std::string const word(text);
  if (word.rfind("0f", 0) == 0 || word.rfind("0F", 0) == 0 || word.rfind("0d", 0) == 0 || word.rfind("0D", 0) == 0) {
    return std::strtoull(word.c_str() + 2, nullptr, 16);
  }
  if (word[0] == '-') return static_cast<std::uint64_t>(std::strtoll(word.c_str(), nullptr, 0));
  return std::strtoull(word.c_str(), nullptr, 0);
}

Run find_run(Opcode const &opcode, std::string const &text) {
  for (auto const find : {scalar, conversion, memory, matrix, barrier, tensor_memory}) {
    if (Run run = find(opcode)) return run;
  }
  return [text](Warp &, Instruction const &, std::uint32_t) -> Outcome {
    fail("the interpreter does not know the instruction '" + text + "'; add it to tests/emulator");
  };
}

// The instructions that name no mask and that all lanes of a warp execute together.
bool is_aligned(Opcode const &opcode) {
  static char const *const kBases[] = {"mma", "wgmma", "ldmatrix", "stmatrix", "movmatrix", "setmaxnreg"};
  for (char const *base : kBases) {
    if (opcode.base() == base) return true;
  }
  if (opcode.base() == "bar") return !opcode.has("warp");
  return opcode.base() == "barrier" && opcode.has("aligned");
}

int bytes_of(std::string_view type) {
  std::size_t const digits = type.find_first_of("0123456789");
  return digits == type.npos ? 1 : std::atoi(std::string(type.substr(digits)).c_str()) / 8;
}

// A variable in shared memory: ".shared .align 16 .b8 name[64]", ".shared .align 4 .f32 name", or ".extern .shared
// .align 1024 .b8 name[]", whose size the launch gives.
struct SharedArray {
  std::string name;
  int bytes, alignment;
  bool dynamic;

  explicit SharedArray(std::string_view text) : dynamic(text.rfind(".extern", 0) == 0) {
    std::size_t const at = text.find(".align"), last = text.find_last_of(" \t"), open = text.find('[');
    if (at == text.npos) fail("the interpreter does not know '" + std::string(text) + "'");
    alignment = std::atoi(std::string(text.substr(at + 6)).c_str());
    std::string_view const before = trimmed(text.substr(0, last));
    int const count = open == text.npos ? 1 : std::atoi(std::string(text.substr(open + 1)).c_str());
    bytes = count * bytes_of(before.substr(before.find_last_of('.')));
    name = std::string(text.substr(last + 1, open == text.npos ? open : open - last - 1));
  }
};

// Reads the body of one kernel.
class Body {
 public:
  Body(Entry &entry, std::vector<SharedArray> const &shared) : entry_(entry), arrays_(shared) {
    scopes_.emplace_back();
  }

  void parameter(std::string_view name, int bytes, int alignment) {
    int &end = entry_.parameter_bytes;
    end = (end + alignment - 1) / alignment * alignment;
    parameters_.emplace(name, end);
    entry_.parameter_offsets.push_back(end), entry_.parameter_sizes.push_back(bytes);
    end += bytes;
  }

  void read(std::string_view text) {
    std::size_t i = 0;
    while (i < text.size()) {
      char const c = text[i];
      if (std::isspace(static_cast<unsigned char>(c)) || c == ';') {
        ++i;
      } else if (c == '{') {
        scopes_.emplace_back(), ++i;
      } else if (c == '}') {
        close_scope(), ++i;
      } else if (std::size_t const colon = label_end(text, i); colon != 0) {
        scopes_.back().labels.emplace(trimmed(text.substr(i, colon - i)), int(entry_.code.size()));
        i = colon + 1;
      } else {
        std::size_t const end = text.find(';', i);
        if (end == text.npos) fail("a PTX statement has no end: " + std::string(text.substr(i, 40)));
        statement(trimmed(text.substr(i, end - i)));
        i = end + 1;
      }
    }
    close_scope();
  }

 private:
  struct Scope {
    std::map<std::string, int, std::less<>> names, labels;
    std::vector<std::pair<int, std::string>> jumps;  // instructions whose label is not known yet
  };

  static std::size_t label_end(std::string_view text, std::size_t i) {
    if (text[i] == '@' || text[i] == '.') return 0;
    while (i < text.size() && is_word(text[i])) ++i;
    while (i < text.size() && (text[i] == ' ' || text[i] == '\t')) ++i;
    return i < text.size() && text[i] == ':' && (i + 1 == text.size() || text[i + 1] != ':') ? i : 0;
  }

  // Labels that a scope does not have are those of the one around it.
  void close_scope() {
    Scope scope = std::move(scopes_.back());
    scopes_.pop_back();
    for (auto &[instruction, label] : scope.jumps) {
      auto const found = scope.labels.find(label);
      if (found != scope.labels.end()) {
        entry_.code[std::size_t(instruction)].target = found->second;
      } else if (scopes_.empty()) {
        fail("the label " + label + " is not in the kernel");
      } else {
        scopes_.back().jumps.emplace_back(instruction, label);
      }
    }
  }

  void statement(std::string_view text) {
    if (text.rfind(".reg", 0) == 0) return registers(text);
    if (text.rfind(".pragma", 0) == 0 || text.rfind(".loc", 0) == 0 || text.rfind(".file", 0) == 0) return;
    if (text.rfind(".shared", 0) == 0) return arrays_.push_back(SharedArray(text));
    if (text[0] == '.') fail("the interpreter does not know the PTX directive '" + std::string(text) + "'");
    instruction(text);
  }

  // ".reg .b32 %r<980>" or ".reg .pred p, q"
  void registers(std::string_view text) {
    std::size_t const type = text.find('.', 1), names = text.find_first_of(" \t", type);
    for (std::string_view name : split(text.substr(names))) {
      std::size_t const open = name.find('<');
      if (open == name.npos) {
        scopes_.back().names[std::string(name)] = entry_.rows++;
      } else {
        int const count = std::atoi(std::string(name.substr(open + 1)).c_str());
        std::string const stem(name.substr(0, open));
        for (int i = 0; i < count; ++i) scopes_.back().names[stem + std::to_string(i)] = entry_.rows++;
      }
    }
  }

  // The row of an array's address. Arrays get their place when they are first named.
  int shared_row(SharedArray const &array) {
    if (array.dynamic) {
      entry_.dynamic_shared.push_back(entry_.rows);
      return entry_.rows++;
    }
    auto found = places_.find(array.name);
    if (found == places_.end()) {
      int &end = entry_.static_shared_bytes;
      int const place = (end + array.alignment - 1) / array.alignment * array.alignment;
      found = places_.emplace(array.name, place).first;
      end = place + array.bytes;
    }
    return constant(std::uint64_t(kSharedBase + found->second));
  }

  int constant(std::uint64_t value) {
    auto const [found, is_new] = constants_.try_emplace(value, entry_.rows);
    if (is_new) entry_.constants.emplace_back(entry_.rows++, value);
    return found->second;
  }

  int row(std::string_view word) {
    if (std::isdigit(static_cast<unsigned char>(word[0])) || word[0] == '-') return constant(number(word));
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (auto const found = scope->names.find(word); found != scope->names.end()) return found->second;
    }
    if (word == "_") return entry_.rows++;  // a result that nobody reads
    if (auto const found = kSpecials.find(word); found != kSpecials.end()) {
      entry_.specials.emplace_back(entry_.rows, found->second);
      return entry_.rows++;
    }
    if (auto const found = parameters_.find(word); found != parameters_.end()) {
      return constant(std::uint64_t(found->second));
    }
    for (SharedArray const &array : arrays_) {
      if (array.name == word) return shared_row(array);
    }
    fail("the interpreter does not know the operand '" + std::string(word) + "'");
  }

  // A register or number, {several}, [address + bytes] or [address, {coordinates}].
  void operand(Instruction &in, std::string_view text, int &memory_operands) {
    std::size_t const before = in.rows.size();
    if (text[0] == '{' || text[0] == '[') {
      bool const is_memory = text[0] == '[';
      for (std::string_view part : split(text.substr(1, text.size() - 2))) {
        if (part[0] == '{') {
          for (std::string_view each : split(part.substr(1, part.size() - 2))) in.rows.push_back(row(each));
        } else if (std::size_t const plus = part.find('+'); is_memory && plus != part.npos) {
          in.rows.push_back(row(trimmed(part.substr(0, plus))));
          in.offsets[memory_operands] = static_cast<std::int64_t>(number(trimmed(part.substr(plus + 1))));
        } else {
          in.rows.push_back(row(part));
        }
      }
      if (is_memory && ++memory_operands > 3) fail("more than three addresses in '" + in.text + "'");
    } else if (std::size_t const bar = text.find('|'); bar != text.npos) {
      in.rows.push_back(row(trimmed(text.substr(0, bar)))), in.rows.push_back(row(trimmed(text.substr(bar + 1))));
    } else if (text[0] == '!') {
      in.rows.push_back(row(trimmed(text.substr(1))));
      fail("the interpreter does not know negated operands, as in '" + in.text + "'");
    } else {
      in.rows.push_back(row(text));
    }
    in.counts.push_back(int(in.rows.size() - before));
  }

  void instruction(std::string_view text) {
    Instruction in;
    in.text = std::string(text);
    if (text[0] == '@') {
      in.unless = text[1] == '!';
      std::size_t const end = text.find_first_of(" \t");
      in.guard = row(text.substr(in.unless ? 2 : 1, end - (in.unless ? 2 : 1)));
      text = trimmed(text.substr(end));
    }
    std::size_t const end = text.find_first_of(" \t\n");
    Opcode const opcode(text.substr(0, end));
    std::string_view const rest = end == text.npos ? std::string_view{} : trimmed(text.substr(end));
    in.converges = is_aligned(opcode);
    if (opcode.base() == "bra") {
      scopes_.back().jumps.emplace_back(int(entry_.code.size()), std::string(rest));
    } else {
      int memory_operands = 0;
      for (std::string_view each : split(rest)) operand(in, each, memory_operands);
    }
    in.run = find_run(opcode, in.text);
    entry_.code.push_back(std::move(in));
  }

  Entry &entry_;
  std::vector<SharedArray> arrays_;
  std::map<std::string, int, std::less<>> places_, parameters_;
  std::vector<Scope> scopes_;
  std::map<std::uint64_t, int> constants_;
};

std::string without_comments(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, 2, "//") == 0) i = std::min(text.find('\n', i), text.size() - 1);
    if (text.compare(i, 2, "/*") == 0) i = std::min(text.find("*/", i) + 1, text.size() - 1);
    if (text[i] != '\0') result += text[i];
  }
  return result;
}

std::size_t matching(std::string_view text, std::size_t open, char opens, char closes) {
  int depth = 0;
  for (std::size_t i = open; i < text.size(); ++i) {
    if (text[i] == opens) ++depth;
    if (text[i] == closes && --depth == 0) return i;
  }
  fail(std::string("a ") + opens + " of the PTX is not closed");
}

// "NAME(parameters) directives {body}"
std::shared_ptr<Entry const> read_entry(std::string_view text, std::vector<SharedArray> const &shared) {
  auto entry = std::make_shared<Entry>();
  std::size_t const open = text.find('('), close = matching(text, open, '(', ')');
  entry->name = std::string(trimmed(text.substr(0, open)));
  Body body(*entry, shared);
  for (std::string_view parameter : split(text.substr(open + 1, close - open - 1))) {
    std::size_t const name = parameter.find_last_of(" \t") + 1, bracket = parameter.find('[', name);
    if (bracket != parameter.npos) {
      int const bytes = std::atoi(std::string(parameter.substr(bracket + 1)).c_str());
      int const alignment = std::atoi(std::string(parameter.substr(parameter.find(".align") + 6)).c_str());
      body.parameter(parameter.substr(name, bracket - name), bytes, alignment);
    } else {
      std::string_view const type = trimmed(parameter.substr(0, name));
      int const bytes = bytes_of(type.substr(type.find_last_of('.')));
      body.parameter(parameter.substr(name), bytes, bytes);
    }
  }
  std::size_t const begin = text.find('{', close);
  std::string_view const directives = text.substr(close, begin - close);
  if (std::size_t const at = directives.find(".maxntid"); at != directives.npos) {
    entry->max_threads = std::atoi(std::string(directives.substr(at + 8)).c_str());
  }
  if (std::size_t const at = directives.find(".reqnctapercluster"); at != directives.npos) {
    entry->cluster = unsigned(std::atoi(std::string(directives.substr(at + 18)).c_str()));
  }
  body.read(text.substr(begin + 1, matching(text, begin, '{', '}') - begin - 1));
  return entry;
}

}  // namespace

Opcode::Opcode(std::string_view text) {
  for (std::size_t begin = 0; begin <= text.size();) {
    std::size_t const end = std::min(text.find('.', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
}

bool Opcode::has(std::string_view part) const {
  for (std::string_view each : parts) {
    if (each == part) return true;
  }
  return false;
}

std::shared_ptr<Module const> parse(std::string_view ptx) {
  std::string const all = without_comments(ptx);
  std::string_view const text = all;
  auto module = std::make_shared<Module>();
  std::vector<SharedArray> shared;
  for (std::size_t i = 0; i < text.size();) {
    std::size_t const end = text.find_first_of(";{(", i);
    if (end == text.npos) break;
    std::string_view const head = trimmed(text.substr(i, end - i));
    std::size_t const at = head.find(".entry");
    if (at != head.npos) {
      std::size_t const body = text.find('{', end), close = matching(text, body, '{', '}');
      auto entry = read_entry(trimmed(text.substr(i, close + 1 - i)).substr(at + 6), shared);
      module->entries.emplace(entry->name, entry);
      i = close + 1;
    } else {
      if (head.find(".func") != head.npos) fail("the interpreter does not know functions beside kernels");
      std::size_t const place = std::min(head.rfind(".extern"), head.rfind(".shared"));
      if (head.find(".shared") != head.npos) shared.emplace_back(head.substr(place));
      i = text[end] == ';' ? end + 1 : matching(text, end, text[end], text[end] == '{' ? '}' : ')') + 1;
    }
  }
  return module;
}

FunctionFacts facts(Function const &function) {
  auto const found = function.module->entries.find(function.name);
  if (found == function.module->entries.end()) fail("the PTX has no kernel " + function.name);
  Entry const &entry = *found->second;
  return {entry.static_shared_bytes, entry.parameter_bytes, entry.max_threads};
}

}  // namespace emulator
