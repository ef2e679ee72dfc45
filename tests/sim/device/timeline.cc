#include "timeline.h"

#include <chrono>
#include <cstdio>
#include <mutex>

#include "settings.h"

namespace sim {

namespace {

thread_local size_t bytes[2] = {0, 0};

double seconds(Clock::time_point point) { return std::chrono::duration<double>(point.time_since_epoch()).count(); }

}  // namespace

void note_bytes(size_t sent, size_t received) {
  bytes[0] += sent;
  bytes[1] += received;
}

void note(const char* what, const std::string& group, Clock::time_point began) {
  static const std::string path = words("SIM_TIMELINE");
  if (!path.empty()) {
    static std::mutex lock;
    static FILE* const file = std::fopen((path + "." + std::to_string(rank())).c_str(), "a");
    std::lock_guard<std::mutex> held(lock);
    if (!file) fail("cannot write " + path);
    std::fprintf(file, "%.6f %.6f %zu %zu %s %s\n", seconds(began), seconds(Clock::now()), bytes[0], bytes[1], group.c_str(), what);
    std::fflush(file);
  }
  bytes[0] = bytes[1] = 0;
}

}  // namespace sim
