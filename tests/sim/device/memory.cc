#include "memory.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "settings.h"
#include "stream.h"
#include "waits.h"

namespace sim {

namespace {

constexpr size_t kAlignment = 256;

struct Held {
  size_t now = 0, most = 0;
};
std::mutex& held_lock = *new std::mutex;
std::map<int, Held>& held = *new std::map<int, Held>;  // by device

// SIM_MEMORY: bytes of each device. Without it a device has as much as the host.
size_t capacity() {
  static const auto host = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  static const auto bytes = static_cast<size_t>(setting("SIM_MEMORY", host));
  return bytes;
}
size_t rounded(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

C_Status allocate_host(const C_Device, void** ptr, size_t size) {
  *ptr = std::aligned_alloc(kAlignment, std::max(rounded(size), kAlignment));
  return *ptr ? C_SUCCESS : C_FAILED;
}
C_Status free_host(const C_Device, void* ptr, size_t) {
  std::free(ptr);
  return C_SUCCESS;
}
C_Status allocate(const C_Device device, void** ptr, size_t size) {
  {
    std::lock_guard<std::mutex> lock(held_lock);
    auto& mine = held[device->id];
    if (mine.now + size > capacity()) {
      *ptr = nullptr;  // not a failure: Paddle then frees what it kept, asks again, and says what there was no room for
      return C_SUCCESS;
    }
    mine.now += size;
    mine.most = std::max(mine.most, mine.now);
  }
  return allocate_host(device, ptr, size);
}
C_Status deallocate(const C_Device device, void* ptr, size_t size) {
  wait_for_device(device->id);  // as cudaFree does: what is queued may still read it
  std::free(ptr);
  std::lock_guard<std::mutex> lock(held_lock);
  held[device->id].now -= size;
  return C_SUCCESS;
}
C_Status statistics(const C_Device device, size_t* total, size_t* free) {
  std::lock_guard<std::mutex> lock(held_lock);
  *total = capacity();
  *free = *total - std::min(*total, held[device->id].now);
  return C_SUCCESS;
}

// A copy to or from the host without a stream waits for none: streams that do not block the default one are what Paddle
// makes on a GPU, and it waits for its own before it copies.
C_Status copy(const C_Device, void* to, const void* from, size_t size) {
  std::memmove(to, from, size);
  return C_SUCCESS;
}
// One within the device waits for all streams. Paddle counts on it: so it splits what all_gather brought into the caller's
// list of tensors.
C_Status copy_within(const C_Device device, void* to, const void* from, size_t size) {
  wait_for_device(device->id);
  std::memmove(to, from, size);
  return C_SUCCESS;
}
C_Status copy_between(const C_Device to_device, const C_Device from_device, void* to, const void* from, size_t size) {
  wait_for_device(from_device->id);
  return copy_within(to_device, to, from, size);
}
C_Status set_memory(const C_Device, void* ptr, unsigned char value, size_t size) {
  std::memset(ptr, value, size);
  return C_SUCCESS;
}

C_Status copy_within_later(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  stream->queue.put([=] { std::memmove(to, from, size); });
  return C_SUCCESS;
}
C_Status copy_between_later(const C_Device, const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  return copy_within_later(nullptr, stream, to, from, size);
}
// SIM_COPY_BANDWIDTH: bytes a second from the host; 0 is no limit. The copying stream waits without taking a core.
void take_as_long_as(size_t size) {
  static const double bandwidth = setting("SIM_COPY_BANDWIDTH", 0);
  if (bandwidth <= 0) return;
  std::this_thread::sleep_for(std::chrono::duration<double>(static_cast<double>(size) / bandwidth));
}
// What comes from pageable host memory is taken before the call returns, as CUDA does: the caller may free it. What comes
// from pinned memory is read when the stream comes to it. SIM_PINNED=1 treats all host memory so.
C_Status copy_from_host_later(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  static const bool pinned = setting("SIM_PINNED", 0) > 0;
  auto* first = static_cast<const char*>(from);
  auto taken = pinned ? nullptr : std::make_shared<std::vector<char>>(first, first + size);
  stream->queue.put([=] {
    take_as_long_as(size);
    std::memcpy(to, taken ? taken->data() : first, size);
  });
  return C_SUCCESS;
}
C_Status copy_to_host_later(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  count_wait(Wait::kCopyToHost);  // pageable memory again: CUDA, too, returns when it is there
  stream->queue.wait();
  std::memcpy(to, from, size);
  return C_SUCCESS;
}

C_Status chunk(const C_Device, size_t* size) {
  *size = kAlignment;
  return C_SUCCESS;
}

}  // namespace

void install_memory(C_DeviceInterface* to) {
  to->device_memory_allocate = to->unified_memory_allocate = allocate;
  to->device_memory_deallocate = to->unified_memory_deallocate = deallocate;
  to->host_memory_allocate = allocate_host;
  to->host_memory_deallocate = free_host;
  to->device_memory_set = set_memory;
  to->memory_copy_h2d = to->memory_copy_d2h = copy;
  to->memory_copy_d2d = copy_within;
  to->memory_copy_p2p = copy_between;
  to->async_memory_copy_h2d = copy_from_host_later;
  to->async_memory_copy_d2h = copy_to_host_later;
  to->async_memory_copy_d2d = copy_within_later;
  to->async_memory_copy_p2p = copy_between_later;
  to->device_memory_stats = statistics;
  to->device_min_chunk_size = chunk;
}

}  // namespace sim

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED uint64_t sim_memory_held(int device) {
  std::lock_guard<std::mutex> lock(sim::held_lock);
  return sim::held[device].now;
}
EXPORTED uint64_t sim_memory_most(int device) {
  std::lock_guard<std::mutex> lock(sim::held_lock);
  return sim::held[device].most;
}
