// How often the host stood still until the device had done something. A person who wants speed wants to know which line of
// Python caused it: a listener is called, in the waiting thread, before each wait.
#pragma once

namespace sim {

enum class Wait { kStream = 0, kDevice = 1, kEvent = 2, kCopyToHost = 3 };

void count_wait(Wait what);

// A lent kernel waits for its stream because it runs on the host; a real one would be queued. Such waits do not count.
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
};

}  // namespace sim
