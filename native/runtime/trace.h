// What every thread does, phase by phase, while somebody records it. Else there is no Trace, and
// nothing is timed.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace octavo {

// Nanoseconds of the system's monotonic clock, which Python's perf_counter_ns reads too.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What a phase cannot do without, over all threads. bytes: of weights, keys and values, each read
// once. operations: two a multiplication and addition of the result. executed: byte operations that
// kernels of integer formats run for it, at least; 0 where floats are multiplied.
struct Cost {
  double bytes = 0, operations = 0, executed = 0;
  Cost& operator+=(const Cost& more) {
    bytes += more.bytes, operations += more.operations, executed += more.executed;
    return *this;
  }
};

class Op;

class Trace {
 public:
  // Of a step, beside those of operations. WAKE: until threads run; JOIN: until all are through.
  enum Phase : int32_t { PLAN, WAKE, SAMPLE, JOIN };
  struct Span {
    const Op* op;
    int32_t phase;
    int64_t begin, worked, end;  // worked: from then on it waited for other threads, or helped them
    Cost cost;                   // of thread 0's spans; 0 in the others'
  };

  Trace(int threads, size_t spans) : threads_(size_t(threads)), most_(spans / size_t(threads)) {
    for (Thread& t : threads_) t.spans.reserve(most_);
  }

  void begin(int thread) { threads_[size_t(thread)].last = now_ns(); }
  // The thread is through with what it has done since it was last asked. done: when it began to
  // wait for others, if it did.
  void mark(int thread, const Op* op, int32_t phase, int64_t done, Cost cost) {
    Thread& t = threads_[size_t(thread)];
    const int64_t begin = t.last, end = t.last = now_ns();
    if (t.spans.size() == most_) full_ = true;
    else t.spans.push_back({op, phase, begin, done > begin ? std::min(done, end) : end, end, cost});
  }

  const std::vector<Span>& spans(int thread) const { return threads_[size_t(thread)].spans; }
  bool full() const { return full_; }  // whether spans are missing

 private:
  struct Thread {
    alignas(64) int64_t last = 0;
    std::vector<Span> spans;
  };
  std::vector<Thread> threads_;
  size_t most_;  // spans of a thread
  std::atomic<bool> full_{false};
};

}  // namespace octavo
