// The thread pool under the thread sanitizer: every item of every phase runs exactly once, and what
// a phase wrote is seen by the next, with members delayed at random so that others help.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "runtime/pool.h"

using namespace octavo;

static void fail(const char* what, int members, int phase) {
  fprintf(stderr, "%s: %d members, phase %d\n", what, members, phase);
  exit(1);
}

int main() {
  constexpr int PHASES = 300, MOST = 257;
  for (int members = 1; members <= 4; members++) {
    ThreadPool pool(members);
    Work work(members);
    for (int call = 0; call < 20; call++) {
      std::vector<int> previous(MOST, 0), current(MOST, 0);  // plain ints: a race is a report
      pool.run([&](int member) {
        unsigned state = unsigned(call * 31 + member);
        for (int phase = 0; phase < PHASES; phase++) {
          const int total = phase * 7919 % MOST, chunk = 1 + phase % 5;
          std::vector<int>&from = phase % 2 ? current : previous,
          &to = phase % 2 ? previous : current;
          work.each(member, total, chunk, [&](int begin, int end) {
            for (int i = begin; i < end; i++) {
              state = state * 1664525 + 1013904223;
              if (state >> 24 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
              to[size_t(i)] = from[size_t((i + 1) % MOST)] + 1;
            }
          });
        }
      });
      // The same, alone.
      std::vector<int> a(MOST, 0), b(MOST, 0);
      for (int phase = 0; phase < PHASES; phase++) {
        std::vector<int>&from = phase % 2 ? b : a, &to = phase % 2 ? a : b;
        for (int i = 0; i < phase * 7919 % MOST; i++)
          to[size_t(i)] = from[size_t((i + 1) % MOST)] + 1;
      }
      if (a != previous || b != current)
        fail("phases disagree with a single thread", members, call);
    }
  }
  puts("pool: ok");
}
