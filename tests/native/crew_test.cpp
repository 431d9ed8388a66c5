// How many members work, in a model of a host: it gives each number of members a rate of work, and
// a call what that makes of it.
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "runtime/pool.h"

using namespace octavo;

static void expect(bool right, const char* what, double got) {
  if (right) return;
  fprintf(stderr, "%s: %g\n", what, got);
  exit(1);
}

// Runs calls of 5 ms for some seconds; the mean of what was got done by the second.
static double drive(Crew& crew, double seconds, const std::function<double(int)>& rate) {
  double worked = 0;
  const int calls = int(seconds / 0.005);
  for (int i = 0; i < calls; i++) {
    const double r = rate(crew.size());
    worked += r;
    crew.note(0.005, 0.005 * r);
  }
  return worked / calls;
}

// What two members of a crew that is tried in vain cost: the calls by the second where one of one
// takes 10 ms and one of two, for nothing, `slow`, and what either gets done differs from window to
// window by up to `noise` of a core.
static double restless(double slow, double rate, double noise) {
  Crew crew(2);
  uint32_t random = 1;
  double seconds = 0;
  int calls = 0;
  for (; seconds < 600; calls++) {
    random = random * 1664525 + 1013904223;
    const double took = crew.size() == 1 ? 0.01 : slow;
    crew.note(took, took * (rate + noise * (double(random >> 8) / (1 << 24) - 0.5)));
    seconds += took;
  }
  return calls / seconds;
}

int main() {
  for (double slow : {0.02, 0.05, 0.2, 1.0})
    for (double rate : {0.3, 0.95})
      for (double noise : {0.0, 0.6}) {
        const double calls = restless(slow, rate, noise);
        expect(calls > 92, "trials in vain cost little", calls);
      }

  for (int most : {1, 2, 3, 16}) {
    Crew crew(most);
    const auto free = [](int members) { return 0.95 * members; };
    expect(drive(crew, 5, free) > 0.949 * most, "on a free host all work, always", crew.size());

    // Others want the cores: whoever comes late holds up all, and one alone gets two thirds of a
    // core.
    const auto crowded = [](int members) { return members == 1 ? 0.67 : 0.3; };
    drive(crew, 2, crowded);
    expect(drive(crew, 30, crowded) > (most == 1 ? 0.66 : 0.63),
        "on a crowded host one works, nearly always", crew.size());
    drive(crew, 10 + most, free);  // the longest pause, then one member after the other
    expect(crew.size() == most, "all come back", crew.size());

    // A host that gives all a little less than a core wants all of them.
    const auto shares = [](int members) { return 0.8 * members; };
    drive(crew, 2, crowded);
    drive(crew, 40 + most, shares);
    expect(crew.size() == most, "all come back to cores of four fifths", crew.size());

    // A trial that took a minute is repeated after half a minute.
    if (most > 1) {
      Crew frozen(most);
      drive(frozen, 10 + most, crowded);
      while (frozen.size() == 1) frozen.note(0.005, 0.005 * 0.67);
      frozen.note(60, 3);
      drive(frozen, 35 + most, free);
      expect(frozen.size() == most, "a long trial is not the last", frozen.size());
    }

    // Fewer get less done, if only by a little.
    for (double each : {0.05, 0.17}) {
      Crew weak(most);
      const auto little = [&](int members) { return 0.2 + each * members; };
      drive(weak, 30, little);
      expect(weak.size() == most, "all stay where fewer do less", weak.size());
    }

    // One core of all is taken: the others work on without it.
    const auto shared = [&](int members) {
      return members == most ? 0.5 * members : 0.95 * members;
    };
    drive(crew, 2, shared);
    const double best = most == 1 ? 0.5 : 0.95 * (most - 1);
    expect(drive(crew, 30, shared) > 0.97 * best, "one less works", crew.size());

    // Members that must wait by the nature of the work are not sent away for good.
    Crew uneven(most);
    const auto serial = [](int members) { return 0.9 + 0.1 * members; };
    drive(uneven, 2, serial);
    expect(drive(uneven, 30, serial) > 0.97 * (0.9 + 0.1 * most) || most > 2,
        "no other number would do more", uneven.size());
  }

  // The threads, as many as come: each item once, whatever number had the phases before.
  ThreadPool pool(4);
  Work work(4);
  for (int call = 0; call < 2000; call++) {
    const int members = 1 + call * 7 % 4;
    std::atomic<int> ran[5] = {};
    work.set_members(members);
    pool.run([&](int member) {
      expect(member < members, "a member too many", member);
      for (int phase = 0; phase < 5; phase++)
        work.each(member, phase % 2 ? 37 : 3, 1 + phase,
            [&](int begin, int end) { ran[phase] += end - begin; });
    }, members);
    for (int phase = 0; phase < 5; phase++)
      expect(ran[phase] == (phase % 2 ? 37 : 3), "items that ran", ran[phase]);
  }

  // A team begins with all its threads.
  Team team(2);
  std::atomic<int> members{0};
  team.run([&](int, Work&) { members++; });
  expect(members == 2, "both begin", members);
  puts("crew: ok");
}
