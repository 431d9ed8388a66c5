// Pictures of three bytes a pixel: resized, and cut into an encoder's rows.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../kernels/api.h"

namespace octavo {

struct Picture { size_t height, width; };  // in pixels

// Pixels of four bytes, of which the last says nothing, in three.
void pack_pixels(const uint8_t* in, size_t pixels, uint8_t* out);

// As Pillow's filters are numbered.
enum Filter : int { LANCZOS = 1, BILINEAR = 2, BICUBIC = 3, BOX = 4, HAMMING = 5 };

// Resizes `in` to `out`, byte for byte as Pillow 13: the same weights, sums and order of passes.
// Throws std::invalid_argument for another filter or a picture without pixels.
void resize(const Kernels& kernels, const uint8_t* in, Picture from, uint8_t* out, Picture to,
    Filter filter);

// What an encoder's rows are made of: squares of `side` pixels of each of `frames` pictures, which
// are `apart` lines of `width` pixels from one another. values: what bytes become, 256 a channel.
struct Patches {
  const uint8_t* pixels;
  size_t width, apart;
  int frames, side;
  const float* values;
};

// Rows by channel, picture, line and column; the i-th begins with pixel first[i] of the first
// picture. A number below zero: a row of zeros.
void cut(const Patches& p, const int32_t* first, size_t count, float* out);

}  // namespace octavo
