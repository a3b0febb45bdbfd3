// MHA_TARGET("features") ... MHA_TARGET_END: every function between them is compiled for those features, with gcc's and
// clang's spelling. Include all headers first: what they define stays baseline, so no wide code can reach the rest of
// the program through a shared inline function.
#pragma once

#define MHA_PRAGMA_(text) _Pragma(#text)
#define MHA_PRAGMA(text) MHA_PRAGMA_(text)
#if defined(__clang__)
#define MHA_TARGET(features) MHA_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define MHA_TARGET_END MHA_PRAGMA(clang attribute pop)
#else
#define MHA_TARGET(features) MHA_PRAGMA(GCC push_options) MHA_PRAGMA(GCC target(features))
#define MHA_TARGET_END MHA_PRAGMA(GCC pop_options)
#endif
