#include "stream.h"

#include <set>
#include <thread>
#include <vector>

#include "settings.h"
#include "waits.h"

namespace sim {

namespace {
thread_local const Queue* worked_by_this_thread = nullptr;
}

void Point::reach() {
  std::lock_guard<std::mutex> held(lock_);
  reached_ = true;
  changed_.notify_all();
}
void Point::wait() {
  std::unique_lock<std::mutex> held(lock_);
  changed_.wait(held, [this] { return reached_; });
}
bool Point::reached() {
  std::lock_guard<std::mutex> held(lock_);
  return reached_;
}

// The thread starts with the first task: a process that has only loaded the device has no thread of it, and may fork.
void Queue::put(std::function<void()> task) {
  if (!own_thread_) return task();
  std::lock_guard<std::mutex> held(lock_);
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}
void Queue::wait() {
  std::unique_lock<std::mutex> held(lock_);
  changed_.wait(held, [this] { return idle(); });
}
bool Queue::is_mine() const { return worked_by_this_thread == this; }
bool Queue::empty() {
  std::lock_guard<std::mutex> held(lock_);
  return idle();
}
void Queue::run() {
  worked_by_this_thread = this;
  for (;;) {
    std::unique_lock<std::mutex> held(lock_);
    changed_.wait(held, [this] { return !tasks_.empty(); });
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    held.unlock();
    task();
    held.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

namespace {

// Never destroyed: the threads of streams outlive static storage.
std::mutex& streams_lock = *new std::mutex;
std::set<C_Stream>& streams = *new std::set<C_Stream>;

C_Status create_stream(const C_Device device, C_Stream* stream) {
  static const bool at_once = setting("SIM_SYNC", 0) > 0;
  *stream = new C_Stream_st(device->id, !at_once);
  std::lock_guard<std::mutex> held(streams_lock);
  streams.insert(*stream);
  return C_SUCCESS;
}
C_Status destroy_stream(const C_Device, C_Stream stream) {
  std::lock_guard<std::mutex> held(streams_lock);
  streams.erase(stream);  // the object stays: its thread waits in it
  return C_SUCCESS;
}
C_Status synchronize_stream(const C_Device, C_Stream stream) {
  count_wait(Wait::kStream);
  stream->queue.wait();
  return C_SUCCESS;
}
C_Status query_stream(const C_Device, C_Stream stream) { return stream->queue.empty() ? C_SUCCESS : C_FAILED; }
C_Status synchronize_device(const C_Device device) {
  count_wait(Wait::kDevice);
  wait_for_device(device->id);
  return C_SUCCESS;
}
C_Status add_callback(const C_Device device, C_Stream stream, C_Callback callback, void* data) {
  stream->queue.put([=] {
    C_Status status = C_SUCCESS;
    callback(device, stream, data, &status);
  });
  return C_SUCCESS;
}

C_Status create_event(const C_Device, C_Event* event) {
  *event = new C_Event_st;
  return C_SUCCESS;
}
C_Status destroy_event(const C_Device, C_Event event) {
  delete event;  // a stream that waits for its point holds the point itself
  return C_SUCCESS;
}
C_Status record_event(const C_Device, C_Stream stream, C_Event event) {
  auto point = std::make_shared<Point>();
  {
    std::lock_guard<std::mutex> held(event->lock);
    event->point = point;
  }
  stream->queue.put([point] { point->reach(); });
  return C_SUCCESS;
}
C_Status query_event(const C_Device, C_Event event) {
  auto point = event->now();
  return !point || point->reached() ? C_SUCCESS : C_FAILED;
}
C_Status synchronize_event(const C_Device, C_Event event) {
  count_wait(Wait::kEvent);
  if (auto point = event->now()) point->wait();
  return C_SUCCESS;
}
C_Status stream_wait_event(const C_Device, C_Stream stream, C_Event event) {
  if (auto point = event->now()) stream->queue.put([point] { point->wait(); });
  return C_SUCCESS;
}

}  // namespace

void wait_for_device(int device) {
  std::vector<C_Stream> mine;
  {
    std::lock_guard<std::mutex> held(streams_lock);
    for (auto* stream : streams)
      if (stream->device == device) mine.push_back(stream);
  }
  for (auto* stream : mine)
    if (!stream->queue.is_mine()) stream->queue.wait();
}

void install_streams(C_DeviceInterface* to) {
  to->create_stream = create_stream;
  to->destroy_stream = destroy_stream;
  to->query_stream = query_stream;
  to->stream_add_callback = add_callback;
  to->create_event = create_event;
  to->record_event = record_event;
  to->destroy_event = destroy_event;
  to->query_event = query_event;
  to->synchronize_device = synchronize_device;
  to->synchronize_stream = synchronize_stream;
  to->synchronize_event = synchronize_event;
  to->stream_wait_event = stream_wait_event;
}

}  // namespace sim
