#include "faults.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <vector>

#include "settings.h"

namespace sim {

namespace {

struct Fault {
  std::string kind, kernel;
  uint64_t at = 1;
  double seconds = 0;
  int bit = 0;
};

Fault parsed(const std::string& text, bool* mine) {
  Fault fault;
  std::istringstream parts(text);
  parts >> fault.kind;
  for (std::string part; parts >> part;) {
    auto sign = part.find('=');
    auto key = part.substr(0, sign), value = sign == std::string::npos ? "" : part.substr(sign + 1);
    if (key == "rank") *mine = std::atoi(value.c_str()) == rank();
    else if (key == "at") fault.at = std::strtoull(value.c_str(), nullptr, 10);
    else if (key == "seconds") fault.seconds = std::atof(value.c_str());
    else if (key == "kernel") fault.kernel = value;
    else if (key == "bit") fault.bit = std::atoi(value.c_str());
    else fail("SIM_FAULTS: '" + part + "' in '" + text + "' is none of rank, at, seconds, kernel, bit");
  }
  if (fault.kind != "stall" && fault.kind != "late" && fault.kind != "flip")
    fail("SIM_FAULTS: '" + fault.kind + "' is none of stall, late, flip");
  return fault;
}

const std::vector<Fault>& faults() {  // of this rank
  static const auto& found = *[] {
    auto* mine = new std::vector<Fault>;
    std::istringstream all(words("SIM_FAULTS"));
    for (std::string text; std::getline(all, text, ';');) {
      if (text.find_first_not_of(' ') == std::string::npos) continue;
      bool here = true;
      Fault fault = parsed(text, &here);
      if (here) mine->push_back(fault);
    }
    return mine;
  }();
  return found;
}

double seconds_of(const char* kind, std::atomic<uint64_t>* count) {
  uint64_t now = ++*count;
  double seconds = 0;
  for (auto& fault : faults())
    if (fault.kind == kind && fault.at == now) seconds += fault.seconds;
  return seconds;
}

}  // namespace

double link_stall() {
  static std::atomic<uint64_t> exchanges{0};
  return seconds_of("stall", &exchanges);
}

double collective_delay() {
  static std::atomic<uint64_t> collectives{0};
  return seconds_of("late", &collectives);
}

bool flips_bits() {
  static const bool any = [] {
    for (auto& fault : faults())
      if (fault.kind == "flip") return true;
    return false;
  }();
  return any;
}

int bit_to_flip(const std::string& kernel) {
  static std::mutex lock;
  static std::vector<uint64_t> calls(faults().size(), 0);
  std::lock_guard<std::mutex> held(lock);
  int bit = -1;
  for (size_t i = 0; i < faults().size(); ++i) {
    auto& fault = faults()[i];
    if (fault.kind == "flip" && fault.kernel == kernel && ++calls[i] == fault.at) bit = fault.bit;
  }
  return bit;
}

}  // namespace sim
