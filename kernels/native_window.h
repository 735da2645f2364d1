// How a window goes over images, for what a program calls on a CPU: convolutions and pooling.
#ifndef DPTRAIN_NATIVE_WINDOW_H
#define DPTRAIN_NATIVE_WINDOW_H

#include <stdint.h>

// H and W of the image, P and Q of what comes out, R and S of the window; sh, sw strides, dh, dw dilation, bh, bw rows and
// columns of zeros before the image.
struct dp_Window {
    int64_t H, W, P, Q, R, S, sh, sw, dh, dw, bh, bw;
};

// What a convolution makes: what comes out of the window, or the gradient in the images or in the kernel.
enum dp_Makes { DP_PLACES, DP_IMAGES, DP_KERNEL };

// How it is computed, see `implementation_of` in dptrain/backend/cpu/convolutions.py: as a product of the images as they
// lie, or of patches, by vectors of channels or of pixels, or by Winograd's F(2x2, 3x3).
enum dp_Implementation { DP_PRODUCT, DP_CHANNELS, DP_PIXELS, DP_WINOGRAD, DP_IMPLEMENTATIONS };

#endif
