// No include guard: like the C header, it can be included again after NDEBUG changed.
#undef assert
#ifdef NDEBUG
#define assert(condition) ((void)0)
#else
#define assert(condition) \
    ((condition) ? (void)0 : emu_assert_failed(#condition, __func__, EmuSite{__FILE__, __LINE__}))
#endif
