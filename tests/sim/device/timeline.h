// SIM_TIMELINE=path: each collective as a line of «path.rank», for finding what hides behind what:
// when it began and ended (seconds of the monotonic clock), bytes sent and received, its name, its group.
#pragma once

#include <cstddef>
#include <string>

#include "link.h"

namespace sim {

void note_bytes(size_t sent, size_t received);  // of the collective that this thread carries out
void note(const char* what, const std::string& group, Clock::time_point began);  // it has ended

}  // namespace sim
