// The link of this process: SIM_BANDWIDTH bytes a second in each direction (0: no limit), SIM_LATENCY seconds a message.
// All communicators share it. It waits by sleeping, so it takes no core: what computes meanwhile is really hidden.
#pragma once

#include <chrono>
#include <cstddef>

namespace sim {

using Clock = std::chrono::steady_clock;

// Returns when the link has carried so much in each direction, which could begin then.
void carry(size_t sent, size_t received, Clock::time_point begun);

}  // namespace sim
