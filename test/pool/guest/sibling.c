// sibling is one of several sandboxes that come to hold equal memory. It answers
// lines:
//
//   fill SEED   fill the shared region: equal in all that get the same seed
//   own SEED    fill a smaller region of its own
//   check       compare all memory with what was last written
//
//   sibling --mb=20 --own=4 --base=8
//
// base is how many MiB it has filled when it says READY, for the template.

#include "guest.h"

struct area {
  uint8_t *mem;
  size_t pages;
  uint64_t seed;
};

static void content(uint8_t *p, uint64_t h) {
  gen_text(p, PAGE, h);
  memcpy(p, &h, 8);
}

static uint64_t page_seed(const struct area *a, size_t i) { return mix(a->seed * 1000003 + i); }

static void fill(struct area *a, uint64_t seed) {
  a->seed = seed;
  for (size_t i = 0; i < a->pages; i++) content(a->mem + i * PAGE, page_seed(a, i));
}

static void check(const struct area *a, const char *name) {
  uint8_t want[PAGE];
  if (!a->seed) return;
  for (size_t i = 0; i < a->pages; i++) {
    content(want, page_seed(a, i));
    if (memcmp(want, a->mem + i * PAGE, PAGE)) fail("page %zu of %s is not what was written", i, name);
  }
}

static struct area make(size_t mb) {
  return (struct area){map_or_die(mb * 256, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1), mb * 256, 0};
}

int main(int argc, char **argv) {
  prog_name = "sibling";
  struct area base = make(opt_num(argc, argv, "base", 8));
  struct area common = make(opt_num(argc, argv, "mb", 20));
  struct area own = make(opt_num(argc, argv, "own", 4));
  setvbuf(stdout, NULL, _IOLBF, 0);
  fill(&base, 1);
  puts("READY");
  char line[64];
  while (fgets(line, sizeof line, stdin)) {
    unsigned long long seed;
    if (sscanf(line, "fill %llu", &seed) == 1) {
      fill(&common, seed);
    } else if (sscanf(line, "own %llu", &seed) == 1) {
      fill(&own, seed);
    } else if (!strncmp(line, "check", 5)) {
      check(&base, "the template's memory");
      check(&common, "the common memory");
      check(&own, "its own memory");
    } else {
      break;
    }
    puts("OK");
  }
  return 0;
}
