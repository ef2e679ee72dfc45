#include "link.h"

#include <algorithm>
#include <mutex>
#include <thread>

#include "faults.h"
#include "settings.h"

namespace sim {

namespace {
Clock::duration of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}
}  // namespace

void carry(size_t bytes, Clock::time_point begun) {
  static const double bandwidth = setting("SIM_BANDWIDTH", 0), latency = setting("SIM_LATENCY", 0);
  static std::mutex lock;
  static Clock::time_point free_at{};
  double stalled = link_stall();
  double busy = stalled + (bandwidth > 0 ? static_cast<double>(bytes) / bandwidth : 0);
  if (busy <= 0 && latency <= 0) return;
  Clock::time_point end;
  {
    std::lock_guard<std::mutex> held(lock);
    free_at = std::max(free_at, begun) + of(busy);  // while one message is on its way, another waits: they share it
    end = free_at + of(latency);
  }
  std::this_thread::sleep_until(end);
}

}  // namespace sim
