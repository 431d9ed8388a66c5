// Anonymous memory in 2 MiB pages where the kernel has them, zeroed, handed out in 64-byte steps.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace octavo {

inline size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

class Arena {
 public:
  explicit Arena(size_t bytes) : size_(align_up(bytes ? bytes : 1, HUGE_PAGE)) {
    void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<uint8_t*>(p);
    madvise(base_, size_, MADV_HUGEPAGE);  // advice: plain pages do as well, only slower
  }
  ~Arena() { munmap(base_, size_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <class T> T* allocate(size_t count) {
    size_t bytes = align_up(count * sizeof(T), 64);
    if (used_ + bytes > size_) throw std::bad_alloc();
    T* p = reinterpret_cast<T*>(base_ + used_);
    used_ += bytes;
    return p;
  }
  size_t size() const { return size_; }
  size_t used() const { return used_; }

 private:
  static constexpr size_t HUGE_PAGE = size_t(2) << 20;
  uint8_t* base_;
  size_t size_, used_ = 0;
};

}  // namespace octavo
