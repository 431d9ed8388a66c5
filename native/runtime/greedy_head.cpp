#include "greedy_head.h"

#include <cmath>
#include <limits>

namespace octavo {

constexpr float INFINITE = std::numeric_limits<float>::infinity(),
                LARGEST = std::numeric_limits<float>::max(),
                SMALLEST = std::numeric_limits<float>::min();

// What one thread knows of a row.
struct GreedyHead::Row {
  Act act;                   // its alone
  float* out;                // its logits
  // of high digits, for a token whose weights have a norm of one; infinite: all logits are computed
  float error;
  std::atomic<float>& best;  // of all threads; of two that are stored at once, either
  Found& found;

  // Whether a logit that is at most so large is less than the best. `bound` is off by its rounding,
  // and logits by that of scales whose product is denormal.
  bool excludes(float bound) const {
    const float off = std::fabs(bound) * 0x1p-22f + 0x1p-100f;
    return bound + off < best.load(std::memory_order_relaxed);
  }
  void add(const Found& f) {
    if (!f.before(found)) return;
    found = f;
    if (f.logit > best.load(std::memory_order_relaxed))
      best.store(f.logit, std::memory_order_relaxed);
  }
};

namespace {

// The norm of what low digits stand for bounds it, by the inequality of Cauchy and Schwarz. Sums of
// floats add a rounding for each of their 2 * groups terms at most, of both kinds of logits; inputs
// are at most 127 * 257 of their group's scale. Infinite where sums may overflow.
float error_of(const Act& one, float largest_norm) {
  const int groups = one.k / GROUP;
  double low = 0, largest = 0;
  for (int g = 0; g < groups; g++) {
    const int8_t* q = one.q + digits(0, g, groups) + DIGITS;
    int32_t squares = 0;
    for (int i = 0; i < GROUP; i++) squares += q[i] * q[i];
    const double scale = double(one.scale[tiled(0, g, groups)]);
    low += scale * scale * squares;
    largest += scale * scale * GROUP * (127.0 * 257) * (127.0 * 257);
  }
  if (!(std::sqrt(largest) * double(largest_norm) < double(LARGEST))) return INFINITE;
  const double roundings = 2 * (2 * groups + 4) * 0x1p-24;
  return float((std::sqrt(low) + roundings * std::sqrt(largest)) * (1 + 0x1p-20));
}

}  // namespace

std::unique_ptr<GreedyHead> GreedyHead::of(const Kernels& kernels, const LinearPart& head,
    const Act& in, int rows, int threads, Arena& arena) {
  const Format format = head.weight->format;
  const bool bytes = format == Q8_0 || format == CODE8 || format == IQ4_NL || format == MXFP4;
  if (!scaled(in) || in.second_lines != GROUP_LINES || format >= BF16 || has_minima(format) ||
      head.bias || head.residual || (bytes && kernels.digits_together))
    return nullptr;
  std::unique_ptr<GreedyHead> made(new GreedyHead(head, rows, threads));
  made->norms_ = arena.allocate<float>(size_t(head.weight->panel_count()) * PANEL);
  return made;
}

GreedyHead::GreedyHead(const LinearPart& head, int rows, int threads)
    : weight_(*head.weight),
      out_(head.out),
      best_(size_t(rows)),
      found_(size_t(threads)) {}

bool GreedyHead::measure(size_t bytes, Team& team) {
  const int from = measured_,
            to = std::min(weight_.panel_count(), from + int(bytes / 4 / weight_.panel_bytes) + 1);
  team.run([&](int thread, Work& work) {
    std::vector<float> weights(weight_.cols);
    work.each(thread, (to - from) * PANEL, PANEL, [&](int begin, int end) {
      for (int t = from * PANEL + begin; t < from * PANEL + end; t++) {
        weight_.read_row(size_t(t), weights.data(), nullptr);
        double squares = 0;
        for (float w : weights) squares += double(w) * double(w);
        norms_[t] = std::isfinite(squares)
            ? std::max(float(std::sqrt(squares) * (1 + 0x1p-20)), SMALLEST)
            : INFINITE;
      }
    });
  });
  largest_norm_ = std::max(
      largest_norm_, *std::max_element(norms_ + from * PANEL, norms_ + to * PANEL));
  measured_ = to;
  return !ready();
}

// As if they were all there is, low ones of groups that have one digit; 2^DIGIT times too small.
Act GreedyHead::high_digits(const Act& act) const {
  Act high = act;
  high.q -= DIGITS;
  high.neg_low = act.neg_high;
  high.neg16 = act.neg16_high;
  high.second_lines = 0;
  return high;
}

void GreedyHead::begin(int rows) {
  for (int t = 0; t < rows; t++) best_[size_t(t)].store(-INFINITE, std::memory_order_relaxed);
  for (std::vector<Found>& found : found_) found.assign(size_t(rows), {-INFINITE, NO_TOKEN});
}

void GreedyHead::run(Context& c, int rows, const Act& act, int thread, Work& work) {
  const Act high = high_digits(act);
  const int panels = weight_.panel_count();
  float* screened = c.scratch[size_t(thread)];
  std::vector<Found>& found = found_[size_t(thread)];
  std::vector<Row> states;
  for (int t = 0; t < rows; t++) {
    const Act one = one_row(act, t);
    const float error = error_of(one, largest_norm_);
    states.push_back({one, out_.row(t), error, best_[size_t(t)], found[size_t(t)]});
  }
  work.each(thread, set_count(panels * PANEL), 1, [&](int begin, int end) {
    for (int set = begin; set < end; set++)
      for (int first = 0; first < rows; first += SCREENED) {
        const int count = std::min(SCREENED, rows - first), from = set * SET_PANELS,
                  to = std::min(from + SET_PANELS, panels);
        weight_.multiply(*c.kernels,
            weight_.args(from_row(high, first), count, screened, SET_TOKENS), 0, to - from,
            c.rooms[size_t(thread)], from);
        for (int t = 0; t < count; t++)
          settle(c, from, to, screened + t * SET_TOKENS, states[size_t(first + t)]);
      }
  });
}

// Finds the largest of a row's logits in panels [from, to), as far as they may be the largest.
void GreedyHead::settle(
    const Context& c, int from, int to, const float* screened, Row& row) const {
  const auto bound = [&](int panel, int count) {
    const int at = (panel - from) * PANEL;
    return c.kernels->bound(
        screened + at, norms_ + panel * PANEL, row.error, count * PANEL);
  };
  if (row.excludes(bound(from, to - from))) return;
  float bounds[SET_PANELS];
  for (int p = from; p < to; p++) bounds[p - from] = bound(p, 1);
  const int likely = from + int(std::max_element(bounds, bounds + (to - from)) - bounds);
  multiply(c, likely, row);
  for (int p = from; p < to; p++)
    if (p != likely && !row.excludes(bounds[p - from])) multiply(c, p, row);
}

// Both digits of a row and the tokens of a panel.
void GreedyHead::multiply(const Context& c, int panel, Row& row) const {
  weight_.multiply(*c.kernels, weight_.args(row.act, 1, row.out, out_.stride), panel, panel + 1,
      nullptr);
  if (row.error == INFINITE) return;
  for (int t = panel * PANEL, end = std::min(t + PANEL, out_.width); t < end; t++)
    row.add({row.out[t], t});
}

int32_t GreedyHead::token(int row) const {
  Found best{-INFINITE, NO_TOKEN};
  for (const std::vector<Found>& found : found_)
    if (found[size_t(row)].before(best)) best = found[size_t(row)];
  return best.token;
}

}  // namespace octavo
