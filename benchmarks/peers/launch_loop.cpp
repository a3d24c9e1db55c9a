// Microseconds of the host per call, in C: what one launch costs a program that waits for nothing.
#include <chrono>
#include <cstdint>

namespace {

template <class F>
double mean_us(int count, F const &call) {
  auto const start = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) call(i);
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / count;
}

}  // namespace

extern "C" {
// Calls i modulo `distinct` of an operator, through cutefuse_run or cutefuse_reject; negative when one was refused.
double operator_loop_us(char const *(*function)(std::int32_t, void *), std::int32_t op, void *const *calls,
                        int distinct, int count) {
  bool refused = false;
  double const us = mean_us(count, [&](int i) { refused |= function(op, calls[i % distinct]) != nullptr; });
  return refused ? -1.0 : us;
}

// A prepared CUTLASS launch (peer.h): the price of the launch alone.
double peer_loop_us(int (*function)(void *, void *), void *peer, void *stream, int count) {
  bool refused = false;
  double const us = mean_us(count, [&](int) { refused |= function(peer, stream) != 0; });
  return refused ? -1.0 : us;
}
}
