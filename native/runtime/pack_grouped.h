// Codes whose groups may be of any length, with scales apart: part of pack.cpp's panels.
#pragma once
#include <cstddef>
#include <cstdint>

#include "pack.h"
#include "units.h"

namespace octavo {

// What a code of each format is counted from.
constexpr int ZERO_POINT[] = {8, 0, 16, 0, 128, 128, 128, 0, 4, 0, 0, 32, 8, 0, 128, 0};
constexpr size_t SCALE_LINE = PANEL * sizeof(float);

// Writes the unit of a row in fixed point, the last line of its panel of `bytes` bytes.
void put_unit(uint8_t* panel, size_t bytes, int lane, const RowRange& range);

bool has_minimum(Format f);
size_t scale_lines(int group, size_t cols);
size_t grouped_bytes(Format f, int group, size_t cols);  // of a panel, without units
void pack_grouped(Storage s, Format f, const uint8_t* data, size_t rows, size_t cols, size_t panel,
    uint8_t* out);
void unpack_grouped(Format f, int group, const uint8_t* panel, int lane, size_t cols, float* out);

}  // namespace octavo
