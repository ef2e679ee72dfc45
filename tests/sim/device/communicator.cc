#include "communicator.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <thread>

#include "faults.h"
#include "settings.h"
#include "timeline.h"

using sim::Clock;
using sim::Part;
using sim::fail;

namespace {

double patience() {
  static const double seconds = sim::setting("SIM_TIMEOUT", 120);
  return seconds;
}
std::string seconds(double value) {
  auto text = std::to_string(value);
  return text.substr(0, text.find('.') + 2) + " s";
}
Clock::duration of(double value) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(value));
}
bool is_empty(const Part& part) { return part.size == 0; }
bool is_rendezvous() {
  static const bool it_is = sim::words("SIM_SENDS") == "rendezvous";
  return it_is;
}

sockaddr_un address(const std::string& name, size_t rank, socklen_t* size) {  // in the abstract namespace: no file is left
  sockaddr_un where{};
  where.sun_family = AF_UNIX;
  std::string text = "sim-" + name + "-" + std::to_string(rank);
  std::memcpy(where.sun_path + 1, text.data(), text.size());
  *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return where;
}

}  // namespace

C_CCLComm_st::C_CCLComm_st(const std::string& name, size_t rank, size_t ranks)
    : name(name), rank(rank), ranks(ranks), sockets_(ranks, -1) {
  for (size_t i = 0; i < ranks; ++i) outboxes_.push_back(std::make_unique<sim::Queue>());
  meet();
}
void C_CCLComm_st::close() {
  for (int& socket : sockets_) {
    if (socket >= 0) ::close(socket);
    socket = -1;
  }
}

// Each rank opens a door, calls at those of lower rank, and lets those of higher rank in.
void C_CCLComm_st::meet() {
  auto until = Clock::now() + of(patience());
  socklen_t size;
  auto mine = address(name, rank, &size);
  int door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(door, reinterpret_cast<sockaddr*>(&mine), size) || listen(door, 64)) fail("the socket of group " + name + " is taken");
  for (size_t other = 0; other < rank; ++other) sockets_[other] = call(other, until);
  for (size_t left = ranks - 1 - rank; left; --left) {
    pollfd waited{door, POLLIN, 0};
    auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    if (poll(&waited, 1, static_cast<int>(std::max<long>(rest, 0))) <= 0)
      fail(std::to_string(left) + " of " + std::to_string(ranks) + " ranks did not come to group " + name + " within " + seconds(patience()));
    int caller = accept4(door, nullptr, nullptr, SOCK_CLOEXEC);
    uint64_t other;
    if (recv(caller, &other, sizeof other, MSG_WAITALL) != sizeof other) fail("a rank left while group " + name + " met");
    sockets_[other] = caller;
  }
  ::close(door);
}
int C_CCLComm_st::call(size_t other, Clock::time_point until) {
  socklen_t size;
  auto theirs = address(name, other, &size);
  while (Clock::now() < until) {
    int line = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!connect(line, reinterpret_cast<sockaddr*>(&theirs), size)) {
      uint64_t me = rank;
      if (::send(line, &me, sizeof me, MSG_NOSIGNAL) != sizeof me) fail("a rank left while group " + name + " met");
      return line;
    }
    ::close(line);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  fail("rank " + std::to_string(other) + " did not come to group " + name + " within " + seconds(patience()));
}

void C_CCLComm_st::issue(C_Stream stream, const char* what, std::function<void()> work) {
  uint64_t ticket;
  {
    std::lock_guard<std::mutex> held(lock_);
    ticket = issued_++;
  }
  stream->queue.put([=] {
    {
      std::unique_lock<std::mutex> held(lock_);
      changed_.wait(held, [&] { return served_ == ticket; });
    }
    doing_ = what;
    static const bool told = sim::setting("SIM_VERBOSE", 0) > 1;
    if (told) std::fprintf(stderr, "sim: rank %d: call %llu of group %s: %s\n", sim::rank(), static_cast<unsigned long long>(ticket), name.c_str(), what);
    if (double late = sim::collective_delay()) std::this_thread::sleep_for(of(late));
    auto began = Clock::now();
    work();
    sim::note(what, name, began);
    std::lock_guard<std::mutex> held(lock_);
    ++served_;
    changed_.notify_all();
  });
}

void C_CCLComm_st::exchange(std::vector<Part> out, std::vector<Part> in) {
  for (auto& part : out) outboxes_[part.rank]->wait();  // what was sent alone before goes before
  Left left;
  size_t sent = 0, received = 0;
  for (auto& part : out)
    left[sockets_[part.rank]][0].push_back(part), sent += part.size;
  for (auto& part : in)
    left[sockets_[part.rank]][1].push_back(part), received += part.size;
  sim::note_bytes(sent, received);
  auto begun = move_all(std::move(left));  // who came early has waited, and the link has not worked meanwhile
  sim::carry(sent, received, begun);
}

void C_CCLComm_st::send_alone(const Part& part) {
  if (is_rendezvous()) {
    char ready;
    move_all({{sockets_[part.rank], {{{}, {{part.rank, &ready, 1}}}}}});
    sim::carry(part.size, 0, Clock::now());
    move_all({{sockets_[part.rank], {{{part}, {}}}}});
    return;
  }
  auto kept = std::make_shared<std::vector<char>>(part.data, part.data + part.size);
  outboxes_[part.rank]->put([this, kept, to = part.rank] {
    sim::carry(kept->size(), 0, Clock::now());  // it arrives when the link has carried it
    move_all({{sockets_[to], {{{{to, kept->data(), kept->size()}}, {}}}}});
  });
}
void C_CCLComm_st::receive_alone(const Part& part) {
  char ready = 1;
  if (is_rendezvous()) move_all({{sockets_[part.rank], {{{{part.rank, &ready, 1}}, {}}}}});
  move_all({{sockets_[part.rank], {{{}, {part}}}}});  // the sender has paid for the link
}

Clock::time_point C_CCLComm_st::move_all(Left left) {
  std::map<int, Clock::time_point> first;  // of each socket: when its peer's first bytes came
  Clock::time_point begun = Clock::now();
  for (auto it = left.begin(); it != left.end();) {
    for (auto& parts : it->second) parts.erase(std::remove_if(parts.begin(), parts.end(), is_empty), parts.end());
    it = it->second[0].empty() && it->second[1].empty() ? left.erase(it) : std::next(it);
  }
  while (!left.empty()) {
    std::vector<pollfd> waited;
    for (auto& [socket, parts] : left)
      waited.push_back({socket, static_cast<short>((parts[0].empty() ? 0 : POLLOUT) | (parts[1].empty() ? 0 : POLLIN)), 0});
    if (poll(waited.data(), waited.size(), static_cast<int>(patience() * 1000)) == 0)
      fail("waited " + seconds(patience()) + " for " + waited_for(left) + " of group " + name + ", in " + doing_);
    for (auto& one : waited) {
      auto& parts = left[one.fd];
      if ((one.revents & POLLOUT) && !parts[0].empty()) move(one.fd, parts[0], true);
      if ((one.revents & (POLLIN | POLLHUP | POLLERR)) && !parts[1].empty()) {
        if (first.emplace(one.fd, Clock::now()).second) begun = first[one.fd];
        move(one.fd, parts[1], false);
      }
      else if (one.revents & (POLLHUP | POLLERR)) lost(one.fd);
      if (parts[0].empty() && parts[1].empty()) left.erase(one.fd);
    }
  }
  return begun;
}
void C_CCLComm_st::move(int socket, std::deque<Part>& parts, bool out) {
  auto& part = parts.front();
  ssize_t done = out ? ::send(socket, part.data, part.size, MSG_DONTWAIT | MSG_NOSIGNAL)
                     : ::recv(socket, part.data, part.size, MSG_DONTWAIT);
  if (done < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (done <= 0) lost(socket);
  part.data += done;
  part.size -= static_cast<size_t>(done);
  if (!part.size) parts.pop_front();
}

std::string C_CCLComm_st::waited_for(const Left& left) const {
  std::string found;
  for (size_t other = 0; other < ranks; ++other)
    if (left.count(sockets_[other])) found += (found.empty() ? "" : ", ") + std::to_string(other);
  return "rank " + found;
}
void C_CCLComm_st::lost(int socket) const {
  size_t other = static_cast<size_t>(std::find(sockets_.begin(), sockets_.end(), socket) - sockets_.begin());
  fail("rank " + std::to_string(other) + " of group " + name + " is gone, in " + doing_);
}
