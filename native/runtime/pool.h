// A fixed team of threads that runs one function together, with a barrier cheap enough to use
// hundreds of times per step. The calling thread is member 0; helpers sleep between calls.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace octavo {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }
  void run(const std::function<void(int)>& work);  // work(thread) on every member; must not throw
  void barrier();                                  // callable only inside run, by every member

 private:
  void helper(int thread);

  const int size_;
  std::vector<std::thread> helpers_;
  const std::function<void(int)>* work_ = nullptr;
  bool stop_ = false;
  alignas(64) std::atomic<uint32_t> call_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> sleeping_{0};
};

// Divides `total` items among the members: each takes chunks from the front of its own share, then
// from the others'. Which member runs an item never changes what the item computes.
class Work {
 public:
  explicit Work(int members) : members_(members), cursor_(new Cursor[members]) {}
  void reset() {
    for (int i = 0; i < members_; i++) cursor_[i].next.store(0, std::memory_order_relaxed);
  }
  template <class F> void each(int member, int total, int chunk, F&& f) {
    for (int i = 0; i < members_; i++) {
      const int owner = (member + i) % members_;
      const int begin = int(int64_t(total) * owner / members_), end = int(int64_t(total) * (owner + 1) / members_);
      for (;;) {
        const int at = begin + cursor_[owner].next.fetch_add(chunk, std::memory_order_relaxed);
        if (at >= end) break;
        f(at, at + chunk < end ? at + chunk : end);
      }
    }
  }

 private:
  struct alignas(64) Cursor { std::atomic<int> next{0}; };
  int members_;
  std::unique_ptr<Cursor[]> cursor_;
};

}  // namespace octavo
