// Streams and events: a stream runs what is put into it in order, on a thread of its own; an event is a point in a stream.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "paddle/phi/backends/device_ext.h"

namespace sim {

// A point in a stream, once an event is recorded there.
class Point {
 public:
  void reach();
  void wait();
  bool reached();

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool reached_ = false;
};

class Queue {
 public:
  // Without a thread of its own, what is put in is done at once: SIM_SYNC=1.
  explicit Queue(bool own_thread = true) : own_thread_(own_thread) {}
  void put(std::function<void()> task);
  void wait();   // until it is empty and at rest
  bool empty();  // and at rest
  bool is_mine() const;  // whether the calling thread is the one that works it off: it must not wait for itself

 private:
  bool idle() const { return tasks_.empty() && !busy_; }
  void run();

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false, started_ = false;
  const bool own_thread_;
};

void wait_for_device(int device);  // until all its streams are at rest
void install_streams(C_DeviceInterface* interface);

}  // namespace sim

struct C_Stream_st {
  C_Stream_st(int id, bool own_thread) : device(id), queue(own_thread) {}
  const int device;
  sim::Queue queue;
};

struct C_Event_st {
  std::mutex lock;
  std::shared_ptr<sim::Point> point;  // none until it is recorded: as with CUDA, such an event counts as reached

  std::shared_ptr<sim::Point> now() {
    std::lock_guard<std::mutex> held(lock);
    return point;
  }
};
