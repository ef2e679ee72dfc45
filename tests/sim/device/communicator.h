// What connects the ranks of one group: a Unix socket between each two, messages on them, and the order of calls.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "link.h"
#include "stream.h"

namespace sim {

// One message of an exchange, to or from a rank of the group.
struct Part {
  size_t rank;
  char* data;
  size_t size;
};

}  // namespace sim

struct C_CCLComm_st {
  // Meets the others under `name`, which they have by Paddle's store. Ends the process when they do not come.
  C_CCLComm_st(const std::string& name, size_t rank, size_t ranks);
  void close();

  const std::string name;
  const size_t rank, ranks;

  // Puts `work` into the stream. Calls on one communicator are carried out in the order they were issued in, whatever
  // their streams. `what` is for the message when a peer does not answer.
  void issue(C_Stream stream, const char* what, std::function<void()> work);

  // All messages at once: whoever waits for a peer goes on taking what the others send. Only inside `issue`.
  void exchange(std::vector<sim::Part> out, std::vector<sim::Part> in);

  // A send, or a receive, outside of a group; see `SIM_SENDS` in collectives.cc.
  void send_alone(const sim::Part& part);
  void receive_alone(const sim::Part& part);

 private:
  using Left = std::map<int, std::array<std::deque<sim::Part>, 2>>;  // by socket: what is still to be sent, and received

  void meet();
  int call(size_t other, sim::Clock::time_point until);
  sim::Clock::time_point move_all(Left left);  // returns when the last peer began to send
  void move(int socket, std::deque<sim::Part>& parts, bool out);
  std::string waited_for(const Left& left) const;
  [[noreturn]] void lost(int socket) const;

  std::vector<int> sockets_;
  std::vector<std::unique_ptr<sim::Queue>> outboxes_;  // by rank: what was sent alone and not taken yet
  const char* doing_ = "";
  std::mutex lock_;
  std::condition_variable changed_;
  uint64_t issued_ = 0, served_ = 0;
};
