// Memory handed out in 64-byte steps: anonymous, zeroed, in 2 MiB pages where the kernel has them;
// or what an arena held before, mapped from a file; or none at all, to count what would be handed
// out.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace octavo {

inline size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Pages of a mapped file. Those that are in the page cache are only entered into this process's
// table, many at a time.
constexpr size_t PAGE = 4096;
inline void populate(const uint8_t* begin, const uint8_t* end) {
  constexpr int POPULATE_READ = 22;  // MADV_POPULATE_READ, since Linux 5.14
  const uint8_t* first = begin - reinterpret_cast<uintptr_t>(begin) % PAGE;
  if (madvise(const_cast<uint8_t*>(first), size_t(end - first), POPULATE_READ) == 0) return;
  for (const uint8_t* p = first; p < end; p += PAGE) (void)*static_cast<const volatile uint8_t*>(p);
}
// memory that is to be written, as it is, before that
inline void prefault(uint8_t* begin, uint8_t* end) {
  constexpr int POPULATE_WRITE = 23;
  uint8_t* first = begin - reinterpret_cast<uintptr_t>(begin) % PAGE;
  if (madvise(first, size_t(end - first), POPULATE_WRITE) == 0) return;
  for (uint8_t* p = begin; p < end; p += PAGE) __atomic_fetch_or(p, uint8_t(0), __ATOMIC_RELAXED);
}
// from the table; who reads them again gets them again
inline void give_back(const uint8_t* begin, const uint8_t* end) {
  const uint8_t* first = begin - reinterpret_cast<uintptr_t>(begin) % PAGE;
  madvise(const_cast<uint8_t*>(first), size_t(end - first), MADV_DONTNEED);
}

class Arena {
 public:
  // Gives addresses that nobody may read or write, and counts their bytes.
  Arena()
      : kind_(Kind::counting),
        base_(reinterpret_cast<uint8_t*>(HUGE_PAGE)),
        size_(SIZE_MAX / 2) {}
  explicit Arena(size_t bytes)
      : kind_(Kind::memory),
        size_(align_up(bytes ? bytes : 1, HUGE_PAGE)) {
    void* p = mmap(
        nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<uint8_t*>(p);
    madvise(base_, size_, MADV_HUGEPAGE);  // advice: plain pages do as well, only slower
  }
  // A file of an arena of which `used` bytes had been handed out, and the sum that `save` was
  // given: null if there is no such file.
  static std::unique_ptr<Arena> from_file(const char* path, size_t used, uint64_t& sum) {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat s;
    if (file < 0) return nullptr;
    Trailer t{};
    const bool whole = fstat(file, &s) == 0 && s.st_size > off_t(sizeof t) &&
        pread(file, &t, sizeof t, s.st_size - off_t(sizeof t)) == ssize_t(sizeof t) &&
        t.magic == MAGIC && t.used == used && used + sizeof t == size_t(s.st_size);
    void* p = whole
        ? mmap(nullptr, size_t(s.st_size), PROT_READ, MAP_PRIVATE | MAP_POPULATE, file, 0)
        : MAP_FAILED;
    close(file);
    if (p == MAP_FAILED) return nullptr;
    sum = t.sum;
    return std::unique_ptr<Arena>(new Arena(static_cast<uint8_t*>(p), size_t(s.st_size)));
  }

  // Writes what has been handed out and its sum; false, and no file, if that fails.
  bool save(const char* path, uint64_t sum) const {
    const int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return false;
    bool good = true;
    auto put = [&](const uint8_t* p, size_t n) {
      while (good && n) {
        const ssize_t done = write(file, p, n);
        good = done > 0;
        if (good) p += done, n -= size_t(done);
      }
    };
    const Trailer t{MAGIC, used_, sum};
    put(base_, used_);
    put(reinterpret_cast<const uint8_t*>(&t), sizeof t);
    good = fsync(file) == 0 && good;
    good = close(file) == 0 && good;
    if (!good) unlink(path);
    return good;
  }

  bool mapped() const { return kind_ == Kind::mapped; }
  // else contents are there already, or never will be
  bool writable() const { return kind_ == Kind::memory; }
  const uint8_t* data() const { return base_; }

  ~Arena() { if (kind_ != Kind::counting) munmap(base_, size_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <class T> T* allocate(size_t count) {
    size_t bytes = align_up(count * sizeof(T), 64);
    if (used_ + bytes > size_) throw std::bad_alloc();
    T* p = reinterpret_cast<T*>(base_ + used_);
    used_ += bytes;
    return p;
  }
  size_t used() const { return used_; }

 private:
  struct Trailer { uint64_t magic, used, sum; };
  static constexpr uint64_t MAGIC = 0x324B43504F564154;
  static constexpr size_t HUGE_PAGE = size_t(2) << 20;
  enum class Kind { memory, mapped, counting };
  Arena(uint8_t* base, size_t size) : kind_(Kind::mapped), base_(base), size_(size) {}
  Kind kind_;
  uint8_t* base_;
  size_t size_, used_ = 0;
};

}  // namespace octavo
