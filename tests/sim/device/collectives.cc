#include "collectives.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "communicator.h"
#include "reduction.h"
#include "settings.h"

namespace sim {

namespace {

// ------------------------------------------------------------------------------------------------------- communicators

constexpr size_t kIdSize = 48;

C_Status id_size(size_t* size) {
  *size = kIdSize;
  return C_SUCCESS;
}
C_Status unique_id(C_CCLRootId* id) {
  static std::atomic<int> made{0};
  std::memset(id->data, 0, kIdSize);
  auto now = static_cast<unsigned long long>(Clock::now().time_since_epoch().count());
  std::snprintf(static_cast<char*>(id->data), kIdSize, "%d-%llx-%d", getpid(), now, made++);
  return C_SUCCESS;
}
C_Status name_of(C_CCLComm comm, char* name) {
  std::strcpy(name, comm->name.c_str());
  return C_SUCCESS;
}
C_Status meet(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* made) {
  *made = new C_CCLComm_st(static_cast<const char*>(id->data), rank, ranks);
  return C_SUCCESS;
}
C_Status part_ways(C_CCLComm comm) {
  comm->close();  // the object stays: the threads of its outboxes wait in it
  return C_SUCCESS;
}

// --------------------------------------------------------------------------------------------------------- collectives

char* bytes(void* data) { return static_cast<char*>(data); }

// Where each rank's share of `count` elements begins; one more than there are ranks.
std::vector<size_t> shares(size_t count, size_t ranks) {
  std::vector<size_t> starts;
  for (size_t i = 0; i <= ranks; ++i) starts.push_back(count * i / ranks);
  return starts;
}

// Every rank owns a share of the elements: it takes that share from all, and combines it into `to`.
void scatter_reduced(C_CCLComm comm, char* from, char* to, const std::vector<size_t>& starts, C_DataType type, C_CCLReduceOp op) {
  size_t wide = width(type), own = starts[comm->rank + 1] - starts[comm->rank];
  std::vector<char> room(own * wide * comm->ranks);
  std::vector<Part> out, in;
  std::vector<const char*> parts(comm->ranks);
  for (size_t other = 0; other < comm->ranks; ++other) {
    if (other == comm->rank) {
      parts[other] = from + starts[other] * wide;
      continue;
    }
    char* theirs = room.data() + other * own * wide;
    parts[other] = theirs;
    out.push_back({other, from + starts[other] * wide, (starts[other + 1] - starts[other]) * wide});
    in.push_back({other, theirs, own * wide});
  }
  comm->exchange(out, in);
  reduce(to, parts, own, type, op);
}
void gather(C_CCLComm comm, char* own, char* to, const std::vector<size_t>& starts, size_t wide) {
  std::vector<Part> out, in;
  for (size_t other = 0; other < comm->ranks; ++other) {
    if (other == comm->rank) continue;
    out.push_back({other, own, (starts[comm->rank + 1] - starts[comm->rank]) * wide});
    in.push_back({other, to + starts[other] * wide, (starts[other + 1] - starts[other]) * wide});
  }
  comm->exchange(out, in);
}

C_Status all_reduce(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm, C_Stream stream) {
  comm->issue(stream, "all_reduce", [=] {
    auto starts = shares(count, comm->ranks);
    char* own = bytes(to) + starts[comm->rank] * width(type);
    scatter_reduced(comm, bytes(from), own, starts, type, op);
    gather(comm, own, bytes(to), starts, width(type));
  });
  return C_SUCCESS;
}
C_Status reduce_scatter(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm, C_Stream stream) {
  comm->issue(stream, "reduce_scatter", [=] {
    scatter_reduced(comm, bytes(from), bytes(to), shares(count * comm->ranks, comm->ranks), type, op);
  });
  return C_SUCCESS;
}
C_Status all_gather(void* from, void* to, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream) {
  comm->issue(stream, "all_gather", [=] {
    std::memmove(bytes(to) + comm->rank * count * width(type), from, count * width(type));
    gather(comm, bytes(from), bytes(to), shares(count * comm->ranks, comm->ranks), width(type));
  });
  return C_SUCCESS;
}
C_Status broadcast(void* data, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  comm->issue(stream, "broadcast", [=] {
    size_t size = count * width(type);
    std::vector<Part> out, in;
    if (comm->rank != root) in.push_back({root, bytes(data), size});
    for (size_t other = 0; comm->rank == root && other < comm->ranks; ++other)
      if (other != root) out.push_back({other, bytes(data), size});
    comm->exchange(out, in);
  });
  return C_SUCCESS;
}
C_Status reduce_to(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, size_t root, C_CCLComm comm, C_Stream stream) {
  comm->issue(stream, "reduce", [=] {
    std::vector<size_t> starts(comm->ranks + 1, 0);  // the root owns every element
    for (size_t i = root + 1; i <= comm->ranks; ++i) starts[i] = count;
    scatter_reduced(comm, bytes(from), bytes(to), starts, type, op);
  });
  return C_SUCCESS;
}
C_Status all_to_all(const void** from, const size_t* out_counts, const C_DataType* out_types, void** to, const size_t* in_counts,
                    const C_DataType* in_types, size_t rank, size_t ranks, C_CCLComm comm, C_Stream stream) {
  std::vector<Part> out, in;  // taken now: the caller's arrays live no longer than this call
  Part own_out{}, own_in{};
  for (size_t other = 0; other < ranks; ++other) {
    Part leaving{other, bytes(const_cast<void*>(from[other])), out_counts[other] * width(out_types[other])};
    Part coming{other, bytes(to[other]), in_counts[other] * width(in_types[other])};
    if (other == rank) {
      own_out = leaving;
      own_in = coming;
    } else {
      out.push_back(leaving);
      in.push_back(coming);
    }
  }
  comm->issue(stream, "all_to_all", [=] {
    std::memmove(own_in.data, own_out.data, own_in.size);
    comm->exchange(out, in);
  });
  return C_SUCCESS;
}

// --------------------------------------------------------------------------------------------------- sends and receives

// Between group_start and group_end sends and receives are collected: they then go at once, by communicator and stream.
//
// A send outside of a group, under NCCL, ends when its receiver takes it: two ranks that both send first wait for ever.
// SIM_SENDS=rendezvous does the same. It is not the default, because Paddle's ProcessGroupCustom puts no group around
// batch_isend_irecv (ProcessGroupNCCL does), so what is right over NCCL would stand still here: a send is buffered.
struct Group {
  int depth = 0;
  std::map<std::pair<C_CCLComm, C_Stream>, std::array<std::vector<Part>, 2>> parts;
};
thread_local Group group;

C_Status group_start() {
  ++group.depth;
  return C_SUCCESS;
}
C_Status group_end() {
  if (--group.depth) return C_SUCCESS;
  for (auto& [key, parts] : group.parts) {
    auto* comm = key.first;
    comm->issue(key.second, "sends and receives of one group", [comm, out = parts[0], in = parts[1]] { comm->exchange(out, in); });
  }
  group.parts.clear();
  return C_SUCCESS;
}
C_Status send(void* data, size_t count, C_DataType type, size_t to, C_CCLComm comm, C_Stream stream) {
  Part part{to, bytes(data), count * width(type)};
  if (group.depth) group.parts[{comm, stream}][0].push_back(part);
  else comm->issue(stream, "send", [=] { comm->send_alone(part); });
  return C_SUCCESS;
}
C_Status receive(void* data, size_t count, C_DataType type, size_t from, C_CCLComm comm, C_Stream stream) {
  Part part{from, bytes(data), count * width(type)};
  if (group.depth) group.parts[{comm, stream}][1].push_back(part);
  else comm->issue(stream, "recv", [=] { comm->receive_alone(part); });
  return C_SUCCESS;
}

}  // namespace

void install_collectives(C_DeviceInterface* to) {
  to->xccl_get_comm_name = name_of;
  to->xccl_get_unique_id_size = id_size;
  to->xccl_get_unique_id = unique_id;
  to->xccl_comm_init_rank = meet;
  to->xccl_destroy_comm = part_ways;
  to->xccl_all_reduce = all_reduce;
  to->xccl_broadcast = broadcast;
  to->xccl_reduce = reduce_to;
  to->xccl_all_gather = all_gather;
  to->xccl_reduce_scatter = reduce_scatter;
  to->xccl_all_to_all = all_to_all;
  to->xccl_group_start = group_start;
  to->xccl_group_end = group_end;
  to->xccl_send = send;
  to->xccl_recv = receive;
}

}  // namespace sim
