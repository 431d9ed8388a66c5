// A weight matrix as linear layers read it: packed into panels, or still as its rows are stored in
// a mapped file, which become panels in a thread's room whenever they are needed. Both give the
// same bits.
#pragma once
#include <cstddef>
#include <cstdint>

#include "pack.h"
#include "trace.h"

namespace octavo {

struct Matrix {
  Storage storage;
  Format format;
  size_t rows, cols, panel_bytes;
  int id;
  uint8_t* panels;
  const uint8_t* stored = nullptr;  // null: all panels are packed
  int packed = 0;                   // else as many

  static constexpr int ROOM_PANELS = 2;  // what bf16 kernels take at once

  // Of multiplying so many tokens.
  Cost cost(const Act& act, int tokens) const;
  int panel_count() const { return int((rows + PANEL - 1) / PANEL); }
  size_t bytes() const { return stored_bytes(storage, rows, cols); }
  void pack(const uint8_t* data, int from, int to) const;

  LinearArgs args(const Act& act, int tokens, float* out, int stride, const float* bias = nullptr,
      const float* residual = nullptr) const {
    return {panels, panel_bytes, act.k, act, tokens, out, stride, bias, residual, storage.group};
  }
  // Panels [from, to), counted from panel `first`, where columns of `args` begin.
  void multiply(const Kernels& kernels, LinearArgs args, int from, int to, uint8_t* room,
      int first = 0) const;
  void read_row(size_t row, float* out, uint8_t* room) const;
  // asks for a share's first panels; kernels ask for what follows themselves
  void fetch(int panel) const;
};

}  // namespace octavo
