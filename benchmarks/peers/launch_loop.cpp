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
// cutefuse_reject, cutefuse_plan and cutefuse_run; negative when a call was refused.
double judge_loop_us(char const *(*function)(std::int32_t, void *), std::int32_t op, void *call, int count) {
  bool refused = false;
  double const us = mean_us(count, [&](int) { refused |= function(op, call) != nullptr; });
  return refused ? -1.0 : us;
}

double plan_loop_us(char const *(*function)(std::int32_t, void *, void *), std::int32_t op, void *call, void *plan,
                    int count) {
  bool refused = false;
  double const us = mean_us(count, [&](int) { refused |= function(op, call, plan) != nullptr; });
  return refused ? -1.0 : us;
}

// Runs of one plan with each of `distinct` sets of addresses in turn.
double run_loop_us(char const *(*function)(void *, void *), void *plan, void *const *operands, int distinct,
                   int count) {
  bool refused = false;
  double const us = mean_us(count, [&](int i) { refused |= function(plan, operands[i % distinct]) != nullptr; });
  return refused ? -1.0 : us;
}

// A prepared CUTLASS launch (peer.h): the price of the launch alone.
double peer_loop_us(int (*function)(void *, void *), void *peer, void *stream, int count) {
  bool refused = false;
  double const us = mean_us(count, [&](int) { refused |= function(peer, stream) != 0; });
  return refused ? -1.0 : us;
}
}
