// Plain checks that say where they failed.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                                      \
        }                                                                                      \
    } while (false)

#define CHECK_THROWS(expression, error) \
    do {                                \
        bool thrown = false;            \
        try {                           \
            expression;                 \
        } catch (const error&) {        \
            thrown = true;              \
        }                               \
        CHECK(thrown);                  \
    } while (false)
