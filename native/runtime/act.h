// Room for the input of linear layers, in the forms that its consumers read.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "../kernels/api.h"
#include "memory.h"
#include "pack.h"

namespace octavo {

// Digits of a row with the sums that fixed point needs or with those of grouped floats, digits of
// groups with scales of their own (`second_lines` as in Act), or floats (`remainder` as in Act).
// halves: sums by 16, too.
struct ActForms {
  bool fixed, grouped, halves, scaled, bf16, f32;
  int second_lines = GROUP_LINES;
  bool remainder = true;
  bool digits() const { return fixed || grouped || scaled; }
};

// All that kernels by themselves may be given. Without `second_lines`: digits of rows.
inline ActForms every_form(std::optional<int> second_lines) {
  const bool scaled = second_lines.has_value();
  return {!scaled, !scaled, true, scaled, true, true, second_lines.value_or(GROUP_LINES)};
}

inline Act allocate_act(Arena& arena, int rows, int width, ActForms forms,
    bool adapted_bf16 = false, bool adapted_f32 = false) {
  const size_t m = align_up(size_t(rows), ROW_TILE), k = padded_cols(size_t(width));
  Act a{};
  a.k = int(k);
  a.adapted_bf16 = adapted_bf16, a.adapted_f32 = adapted_f32;
  a.second_lines = forms.second_lines, a.remainder = forms.remainder;
  if (forms.digits()) {
    a.q = arena.allocate<int8_t>(m * 2 * k);
    a.scale = arena.allocate<float>(forms.scaled ? m * k / 32 : m);
  }
  if (forms.fixed) {
    a.start_high = arena.allocate<int32_t>(m * k / 32);
    a.start_low = arena.allocate<int32_t>(m * k / 32);
    a.pair_high = arena.allocate<int32_t>(m * k / 64);
    a.pair_low = arena.allocate<int32_t>(m * k / 64);
  }
  if (forms.scaled) {
    a.neg_high = arena.allocate<int32_t>(m * k / 32);
    a.neg_low = arena.allocate<int32_t>(m * k / 32);
  }
  if (forms.grouped || forms.scaled) {
    a.sum = arena.allocate<float>(m * k / 32);
    if (forms.halves) a.neg16 = arena.allocate<int32_t>(m * k / 16);
  }
  if (forms.grouped) a.neg32 = arena.allocate<int32_t>(m * k / 32);
  if (forms.scaled) {
    if (forms.halves) a.neg16_high = arena.allocate<int32_t>(m * k / 16);
    a.line = arena.allocate<uint16_t>(m * k / 16);
    a.second = arena.allocate<int8_t>(m * k / 4);
  }
  if (forms.bf16) a.bf16 = arena.allocate<uint16_t>(m * bf16_stride(a));
  if (forms.f32) a.f32 = arena.allocate<float>(m * k);
  return a;
}

inline size_t act_bytes(int rows, int width, ActForms forms) {
  Arena counting;
  allocate_act(counting, rows, width, forms);
  return counting.used();
}

// The rows of an act from `row`, a multiple of ROW_TILE, on: whatever is tiled is laid out tile
// after tile.
inline Act from_row(const Act& a, int row) {
  const size_t n = size_t(row) * size_t(a.k);
  Act b = a;
  if (a.q) b.q += 2 * n, b.scale += scaled(a) ? n / 32 : size_t(row);
  if (a.start_high) {
    b.start_high += n / 32, b.start_low += n / 32;
    b.pair_high += n / 64, b.pair_low += n / 64;
  }
  if (a.neg_high) b.neg_high += n / 32, b.neg_low += n / 32;
  if (a.sum) b.sum += n / 32;
  if (a.neg32) b.neg32 += n / 32;
  if (a.neg16) b.neg16 += n / 16;
  if (a.neg16_high) b.neg16_high += n / 16;
  if (scaled(a)) b.line += n / 16, b.second += n / 4;
  if (a.bf16) b.bf16 += size_t(row) * bf16_stride(a);
  if (a.f32) b.f32 += n;
  return b;
}

// A row of an act whose groups have scales of their own, wherever it lies in its tile.
inline Act one_row(const Act& act, int row) {
  Act one = from_row(act, row / ROW_TILE * ROW_TILE);
  const int at = row % ROW_TILE;
  one.q += at * LINE;
  one.scale += at, one.sum += at, one.line += 2 * at, one.second += 8 * at;
  one.neg_high += at, one.neg_low += at;
  if (one.neg16) one.neg16 += at, one.neg16_high += at;
  return one;
}

// Steps of one tile and no more features than this compute what linear layers read once for each
// thread: quicker than to divide the rows, wait, and fetch the others' share from their cores.
constexpr int OWN_FEATURES = 32 << 10;

inline int own_rows(int rows, int width) {
  return std::min({rows, ROW_TILE, OWN_FEATURES / int(padded_cols(size_t(width)))});
}

// The input of linear layers: all threads' or, in small steps and where its producer can, each
// thread's own.
struct Input {
  Act shared{};
  std::vector<Act> own;  // by thread; empty: always shared

  bool apart(int rows) const { return !own.empty() && rows == own_rows(rows, shared.k); }
  const Act& of(int rows, int thread) const { return apart(rows) ? own[size_t(thread)] : shared; }
};

inline Input allocate_input(Arena& arena, int rows, int width, ActForms forms, int own,
    bool adapted_bf16, bool adapted_f32) {
  Input in{allocate_act(arena, rows, width, forms, adapted_bf16, adapted_f32), {}};
  for (int i = 0; i < own; i++)
    in.own.push_back(
        allocate_act(arena, own_rows(rows, width), width, forms, adapted_bf16, adapted_f32));
  return in;
}

}  // namespace octavo
