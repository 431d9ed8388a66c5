#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

constexpr int SPINS = 4096;  // about 100 us of pauses: longer than the 30 us that a futex wake takes

// How long a helper stays awake after a call: longer than what lies between two steps. On the host this was measured
// on, a core that has slept even for that long runs the whole next step 15 to 20 % slower.
constexpr std::chrono::microseconds AWAKE(2000);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

}  // namespace

ThreadPool::ThreadPool(int threads) : size_(threads) {
  for (int i = 1; i < size_; i++) helpers_.emplace_back([this, i] { helper(i); });
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  call_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(call_);
  for (auto& t : helpers_) t.join();
}

void ThreadPool::helper(int thread) {
  uint32_t seen = 0;
  for (;;) {
    const auto asleep = std::chrono::steady_clock::now() + AWAKE;
    for (int i = 0; call_.load(std::memory_order_acquire) == seen && (i < SPINS || std::chrono::steady_clock::now() < asleep); i++)
      i < SPINS ? relax() : (void)sched_yield();
    while (call_.load(std::memory_order_acquire) == seen) {
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      futex_wait(call_, seen);
      sleeping_.fetch_sub(1, std::memory_order_relaxed);
    }
    seen++;
    if (stop_) return;
    (*work_)(thread);
    barrier();
  }
}

void ThreadPool::run(const std::function<void(int)>& work) {
  if (size_ == 1) return work(0);
  work_ = &work;
  call_.fetch_add(1, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst)) futex_wake_all(call_);
  work(0);
  barrier();
}

void ThreadPool::barrier() {
  if (size_ == 1) return;
  const uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  // Bounded: on an oversubscribed host the member we wait for may need this very core.
  for (int i = 0; generation_.load(std::memory_order_acquire) == generation; i++) i < SPINS ? relax() : (void)sched_yield();
}

void Work::pause(int spins) { spins < SPINS ? relax() : (void)sched_yield(); }

}  // namespace octavo
