// Faults on request, the same in every run, for tests of what notices them. SIM_FAULTS lists them, one between semicolons:
//
//   stall rank=1 at=20 seconds=3                 the link of rank 1 stands still for 3 s, in its 20th exchange
//   late rank=0 at=5 seconds=2                   rank 0 begins its 5th collective 2 s late: its stream is, not its host
//   flip rank=1 kernel=matmul at=7 bit=20        in what its 7th matmul made, one bit of the first element is turned over
//
// Exchanges, collectives and calls of a kernel are counted from 1, by process.
#pragma once

#include <cstddef>
#include <string>

namespace sim {

double link_stall();         // seconds, for the exchange that begins now; counts it
double collective_delay();   // seconds, for the collective that begins now; counts it
int bit_to_flip(const std::string& kernel);  // in the call that has just ended, or -1; counts it
bool flips_bits();           // whether `bit_to_flip` need be asked at all

}  // namespace sim
