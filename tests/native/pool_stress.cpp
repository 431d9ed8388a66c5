// Members that finish a phase just when another loses patience and begins to help: each item must
// still run exactly once. Phases of one item, over at once, follow long ones, so that what a
// straggler does then shows.
#include <atomic>
#include <chrono>
#include <cstdio>

#include "runtime/pool.h"

using namespace octavo;

int main() {
  using Clock = std::chrono::steady_clock;
  constexpr int LONG = 36, CHUNK = 3, PHASES = 200;
  ThreadPool pool(2);
  Work work(2);
  long phases = 0;
  const auto end = Clock::now() + std::chrono::seconds(6);
  for (int round = 0; Clock::now() < end; round++) {
    std::atomic<int> ran[2 * PHASES] = {};
    // around the limit of patience, wherever it is here
    const auto late = std::chrono::nanoseconds(2000 + round * 137 % 80000);
    pool.run([&](int member) {
      for (int p = 0; p < PHASES; p++) {
        work.each(member, LONG, CHUNK, [&](int from, int to) {
          ran[2 * p] += to - from;
          if (from != (p % 2 ? LONG - CHUNK : LONG / 2 - CHUNK)) return;
          for (const auto until = Clock::now() + late; Clock::now() < until;) {}
        });
        work.each(member, 1, 1, [&](int from, int to) { ran[2 * p + 1] += to - from; });
      }
    });
    for (int p = 0; p < PHASES; p++, phases += 2)
      if (ran[2 * p] != LONG || ran[2 * p + 1] != 1) {
        fprintf(stderr, "phase %ld ran %d of %d items, the next %d of 1\n", phases, int(ran[2 * p]),
            LONG, int(ran[2 * p + 1]));
        return 1;
      }
  }
  printf("pool: each item once in %ld phases\n", phases);
}
