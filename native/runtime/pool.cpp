#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <bit>
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

// about 100 us of pauses: longer than the 30 us that a futex wake takes
constexpr int SPINS = 4096;

// How long a helper stays awake after a call: longer than what lies between two steps. On the host
// this was measured on, a core that has slept even for that long runs the whole next step 15 to 20
// % slower.
constexpr std::chrono::microseconds AWAKE(2000);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

static_assert(std::endian::native == std::endian::little,
    "the kernel looks at the first four bytes of a word");

template <class T> void futex_wait(std::atomic<T>& word, T seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, uint32_t(seen),
      nullptr, nullptr, 0);
}

template <class T> void futex_wake_all(std::atomic<T>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr,
      nullptr, 0);
}

}  // namespace

double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

ThreadPool::ThreadPool(int threads) : size_(threads) {
  for (int i = 1; i < size_; i++) helpers_.emplace_back([this, i] { helper(i); });
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  post(next(size_));
  for (auto& t : helpers_) t.join();
}

void ThreadPool::post(uint64_t call) {
  const bool more = members(call) > members(call_.load(std::memory_order_relaxed));
  call_.store(call, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst)) futex_wake_all(call_);
  if (!more) return;
  joined_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(joined_);
}

// The next call that `thread` is a member of.
uint64_t ThreadPool::await(int thread, uint64_t seen) {
  uint64_t call = seen;
  const auto asleep = std::chrono::steady_clock::now() + AWAKE;
  for (int i = 0; i < SPINS || std::chrono::steady_clock::now() < asleep; i++) {
    if ((call = call_.load(std::memory_order_acquire)) != seen) break;
    i < SPINS ? relax() : (void)sched_yield();
  }
  for (;;) {
    const uint32_t joined = joined_.load(std::memory_order_seq_cst);
    call = call_.load(std::memory_order_seq_cst);
    const bool member = members(call) > thread;
    if (member && call != seen) return call;
    if (!member) {
      futex_wait(joined_, joined);
      continue;
    }
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    futex_wait(call_, call);
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
  }
}

void ThreadPool::helper(int thread) {
  for (uint64_t call = 0;;) {
    call = await(thread, call);
    if (stop_) return;
    (*work_)(thread);
    barrier(members(call));
  }
}

void ThreadPool::run(const std::function<void(int)>& work, int members) {
  if (members == 1) return work(0);  // helpers sleep on, or will when they have waited long enough
  work_ = &work;
  post(next(members));
  work(0);
  barrier(members);
}

void ThreadPool::barrier(int members) {
  const uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  // Bounded: on an oversubscribed host the member we wait for may need this very core.
  for (int i = 0; generation_.load(std::memory_order_acquire) == generation; i++)
    i < SPINS ? relax() : (void)sched_yield();
}

void Team::run(const std::function<void(int, Work&)>& f) {
  const int members = crew_.size();
  const auto began = std::chrono::steady_clock::now();
  work_.set_members(members);
  pool_.run([&](int thread) {
    const double before = thread_seconds();
    f(thread, work_);
    worked_[size_t(thread)].of = thread_seconds() - before - work_.take_waited(thread);
  }, members);
  double worked = 0;
  for (int i = 0; i < members; i++) worked += worked_[size_t(i)].of;
  crew_.note(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(), worked);
}

void Work::pause(int spins) { spins < SPINS ? relax() : (void)sched_yield(); }

}  // namespace octavo
