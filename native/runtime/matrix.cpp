#include "matrix.h"

#include <algorithm>

namespace octavo {

constexpr size_t FIRST_FETCH = 8 << 10;  // bytes of weights to ask for before an operation begins

void Matrix::pack(const uint8_t* data, int from, int to) const {
  for (int p = from; p < to; p++)
    pack_panel(storage, data, rows, cols, size_t(p), panels + size_t(p) * panel_bytes);
}

void Matrix::multiply(
    const Kernels& kernels, LinearArgs args, int from, int to, uint8_t* room, int first) const {
  if (!stored) {
    args.panels += size_t(first) * panel_bytes;
    return kernels.linear[format](args, from, to);
  }
  args.panels = room;
  for (int begin = from; begin < to; begin += ROOM_PANELS) {
    const int count = std::min(ROOM_PANELS, to - begin), columns = begin * PANEL;
    for (int i = 0; i < count; i++)
      pack_panel(
          storage, stored, rows, cols, size_t(first + begin + i), room + size_t(i) * panel_bytes);
    LinearArgs a = args;
    a.out += columns;
    if (a.bias) a.bias += columns;
    if (a.residual) a.residual += columns;
    kernels.linear[format](a, 0, count);
  }
}

Cost Matrix::cost(const Act& act, int tokens) const {
  if (!tokens) return {};
  const double operations = 2.0 * double(rows) * double(cols) * tokens;
  const double second = scaled(act) ? double(act.second_lines) / GROUP_LINES : 1,
               digits = format >= BF16 ? 0 : 1 + second;
  const size_t panels = size_t(panel_count()) * panel_bytes;
  return {double(stored ? bytes() : panels), operations, digits * operations};
}

void Matrix::read_row(size_t row, float* out, uint8_t* room) const {
  const uint8_t* panel = panels + row / PANEL * panel_bytes;
  if (stored) pack_panel(storage, stored, rows, cols, row / PANEL, room), panel = room;
  unpack_row(format, storage.group, panel, int(row % PANEL), cols, out);
}

void Matrix::fetch(int panel) const {
  if (stored) return;
  const uint8_t* p = panels + size_t(panel) * panel_bytes;
  for (size_t i = 0; i < FIRST_FETCH; i += 64) __builtin_prefetch(p + i, 0, 2);
}

}  // namespace octavo
