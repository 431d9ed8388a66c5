// Threads that run one function together. The calling thread is member 0; helpers sleep between
// calls, and sleep on where a call has fewer members. `Work` leads the members through the phases
// of that function; a `Team` has as many members as the host has cores for.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "crew.h"
#include "trace.h"

namespace octavo {

double thread_seconds();  // that the calling thread has run

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }
  // work(thread) on every member; must not throw
  void run(const std::function<void(int)>& work) { run(work, size_); }
  void run(const std::function<void(int)>& work, int members);          // on the first so many

 private:
  static int members(uint64_t call) { return int(call & 0xFFFF); }
  uint64_t next(int members) const {
    return (call_.load(std::memory_order_relaxed) >> 16 << 16) + 0x10000 + uint64_t(members);
  }
  void post(uint64_t call);
  uint64_t await(int thread, uint64_t seen);
  void helper(int thread);
  void barrier(int members);

  const int size_;
  std::vector<std::thread> helpers_;
  const std::function<void(int)>* work_ = nullptr;
  bool stop_ = false;
  alignas(64) std::atomic<uint64_t> call_{0};  // its number, and in the low 16 bits its members
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> sleeping_{0};   // members of the last call
  // changes when a call has more members than the one before
  alignas(64) std::atomic<uint32_t> joined_{0};
};

// A phase after another, each a number of items divided among the members, who leave it together.
//
// What a phase costs beyond its items is one cache line from member to member (a core may be half a
// microsecond away), so a member signals by writing its own line and reads the others'. Phases of
// few items are divided once for all. In longer ones a member takes chunks of its own share by its
// own cursor, and when it has waited long for the others, which something must have taken off their
// cores, it takes chunks of theirs. Which member runs an item never changes what the item computes.
//
// A member writes its state, then reads the others', both in the one order of all such accesses
// (seq_cst). Else a helper might miss that another is done while that one misses the helper, goes
// on, and resets the cursor that the helper is about to take from.
class Work {
 public:
  explicit Work(int members)
      : most_(members),
        count_(members),
        members_(new Member[size_t(members)]) {}

  // Runs f(begin, end) over [0, total) in pieces of `chunk` or, if small, one piece a member. Every
  // member calls this with the same total and chunk, and returns when all items are done.
  template <class F> void each(int member, int total, int chunk, F&& f) {
    Member& me = members_[member];
    const uint64_t phase = ++me.phase;
    const int begin = first(member, total), end = first(member + 1, total);
    const bool shared = count_ > 1 && total > chunk * count_;
    if (shared) take(me, phase, begin, end, chunk, f);
    else if (begin < end) f(begin, end);
    if (count_ == 1) return;
    me.cursor[(phase + 1) % 2].store(0, std::memory_order_relaxed);
    if (me.timed) me.done = now_ns();
    me.state.store(2 * phase);
    double began = -1;
    for (int spins = 0; !complete(member, phase); spins++) {
      if (spins == PATIENCE) {
        if (shared) {
          me.state.store(2 * phase + 1);  // not done after all
          for (int i = 0; i < count_; i++)
            if (!passed(i, phase))
              take(members_[i], phase, first(i, total), first(i + 1, total), chunk, f);
          me.state.store(2 * phase, std::memory_order_release);
        }
        began = thread_seconds();
      }
      pause(spins);
    }
    if (began >= 0) me.waited += thread_seconds() - began;
  }

  // How many members the next phases have; while none runs any.
  void set_members(int count) {
    if (count == count_) return;
    count_ = count;
    for (int i = 0; i < most_; i++) {
      members_[i].phase = 0;
      members_[i].state.store(0);
      for (auto& cursor : members_[i].cursor) cursor.store(0);
    }
  }

  // Seconds that a member has run since it was last asked, while it only waited for others (but for
  // short waits).
  double take_waited(int member) { return std::exchange(members_[member].waited, 0.0); }

  // Whether a member keeps when it was last through with its share, which `done` tells: 0 before.
  void set_timed(int member, bool timed) { members_[member].timed = timed; }
  int64_t done(int member) const { return members_[member].done; }

  int members() const { return count_; }
  int first(int member, int total) const { return int(int64_t(total) * member / count_); }

 private:
  struct Member {
    alignas(64) uint64_t phase = 0;              // its own count
    double waited = 0;
    bool timed = false;
    int64_t done = 0;
    // 2 * phase: its share is done; one more: it helps others
    alignas(64) std::atomic<uint64_t> state{0};
    // items taken of its share, for even and odd phases
    alignas(64) std::atomic<int> cursor[2] = {0, 0};
  };
  static constexpr int PATIENCE = 1000;  // pauses before helping: 10 to 40 us

  bool passed(int i, uint64_t phase) const {
    const uint64_t state = members_[i].state.load();
    return state >= 2 * phase && state != 2 * phase + 1;
  }
  // True when all have passed. A member seen as done may have begun to help a later one since, so
  // one look at all must follow the look at the last.
  bool complete(int member, uint64_t phase) const {
    for (int look = 0; look < (count_ > 2 ? 2 : 1); look++)
      for (int i = 0; i < count_; i++)
        if (i != member && !passed(i, phase)) return false;
    return true;
  }
  template <class F>
  void take(Member& owner, uint64_t phase, int begin, int end, int chunk, F&& f) {
    for (;;) {
      const int at = begin + owner.cursor[phase % 2].fetch_add(chunk, std::memory_order_acq_rel);
      if (at >= end) return;
      f(at, at + chunk < end ? at + chunk : end);
    }
  }
  static void pause(int spins);

  const int most_;
  int count_;
  std::unique_ptr<Member[]> members_;
};

// A pool that works in phases, with as many of its threads as get something done together.
class Team {
 public:
  explicit Team(int threads)
      : pool_(threads),
        work_(threads),
        crew_(threads),
        worked_(new Seconds[size_t(threads)]) {}

  int size() const { return pool_.size(); }
  // f(thread, work) on those members; must not throw
  void run(const std::function<void(int, Work&)>& f);

 private:
  struct Seconds { alignas(64) double of = 0; };

  ThreadPool pool_;
  Work work_;
  Crew crew_;
  std::unique_ptr<Seconds[]> worked_;
};

}  // namespace octavo
