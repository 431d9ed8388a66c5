// Where the time of steps goes: seconds by kind of operation, counted on thread 0 from barrier to
// barrier. Always on: a reading of the time stamp counter per phase, a few microseconds a step.
#pragma once
#include <chrono>
#include <map>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace octavo {

class Profile {
 public:
  void begin() {
    began_ = Clock::now();
    first_ = last_ = ticks();
  }
  // A phase of this name, to be marked; its number.
  int add(std::string name) {
    phases_.push_back({std::move(name), 0});
    return int(phases_.size()) - 1;
  }
  // What has run since the last mark was this phase.
  void mark(int phase) {
    const uint64_t now = ticks();
    phases_[size_t(phase)].ticks += now - last_;
    last_ = now;
  }
  void end() {
    steps_++;
    seconds_ += std::chrono::duration<double>(Clock::now() - began_).count();
    ticks_ += ticks() - first_;
  }

  long steps() const { return steps_; }
  double seconds() const { return seconds_; }  // inside steps, all told
  std::map<std::string, double> by_name() const {
    std::map<std::string, double> out;
    for (const Phase& p : phases_)
      out[p.name] += ticks_ ? double(p.ticks) * seconds_ / double(ticks_) : 0;
    return out;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Phase { std::string name; uint64_t ticks; };
  static uint64_t ticks() {
#if defined(__x86_64__)
    return __rdtsc();
#else
    return uint64_t(Clock::now().time_since_epoch().count());
#endif
  }
  std::vector<Phase> phases_;
  Clock::time_point began_;
  uint64_t first_ = 0, last_ = 0, ticks_ = 0;
  double seconds_ = 0;
  long steps_ = 0;
};

}  // namespace octavo
