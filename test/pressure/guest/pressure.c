// pressure holds more memory than its sandbox may have uncompressed. It answers lines:
//
//   fill MIB THREADS   write so much memory, each thread its part
//   again              write other content to all of it
//   read MIB           have the kernel write it, which reads a pipe
//   files MIB          write so much more to files below /tmp, through the kernel
//   random MIB         write memory that no codec makes smaller
//   fork CHILDREN      have children share the memory, each then write a part of it anew
//   verify             compare all with what was written, blocks in random order, twice
//   quit
//
// and each of them with "OK", or FAIL and what is wrong.

#include "guest.h"

#include <sys/prctl.h>

// Memory is written and read again in blocks of 256 KiB, as programs use it: not one
// page here and one there.
#define BLOCK 64UL

#define MAXTHREADS 16
#define FILEPAGES 256UL

// ---- what pages hold -------------------------------------------------------------

// 1024 words, 2 to 9 letters long, which 7 of 8 times are among the first 64, in runs that
// come again: like logs, which compress to a quarter.
static char words[1024][12];
static uint8_t word_len[1024];

static void make_words(void) {
  struct rng g = {7};
  for (int i = 0; i < 1024; i++) {
    int n = 2 + below(&g, 8);
    for (int k = 0; k < n; k++) words[i][k] = 'a' + below(&g, 26);
    words[i][n] = ' ';
    word_len[i] = n + 1;
  }
}

static void content(uint8_t *p, uint64_t seed) {
  struct rng g = {mix(seed)};
  size_t n = snprintf((char *)p, 40, "%016llx ", (unsigned long long)seed);
  while (n < PAGE) {
    uint64_t h = rnd(&g);
    if (n > 256 && h % 8 < 2) {
      size_t from = (h >> 8) % (n - 128), len = 32 + (h >> 40) % 64;
      if (len > PAGE - n) len = PAGE - n;
      memcpy(p + n, p + from, len);
      n += len;
      continue;
    }
    unsigned w = h % 64 < 56 ? (h >> 8) & 63 : (h >> 8) & 1023;
    size_t len = word_len[w];
    if (len > PAGE - n) len = PAGE - n;
    memcpy(p + n, words[w], len);
    n += len;
  }
}

static void check(const uint8_t *got, uint64_t seed, const char *where, size_t i) {
  uint8_t want[PAGE];
  content(want, seed);
  if (!memcmp(want, got, PAGE)) return;
  size_t first = 0;
  while (first < PAGE && want[first] == got[first]) first++;
  fail("page %zu of %s is not what was written, from byte %zu on%s", i, where, first,
       all_zero(got, PAGE) ? ": it is zero" : "");
}

// ---- memory ------------------------------------------------------------------------

// Page i holds what follows from its number, from how often all was written, and from
// the process that wrote it last if that is a child.
static uint8_t *mem;
static size_t pages;
static uint64_t generation;
static uint64_t own;  // the child's number, 0 in the parent
static size_t own_from, own_to;

static uint64_t seed_of(size_t i) {
  return (generation << 40) + i * 16 + (i >= own_from && i < own_to ? own : 0);
}

static unsigned threads;
static int passes = 2;

static void *fill_part(void *arg) {
  size_t k = (size_t)arg;
  for (size_t i = pages * k / threads; i < pages * (k + 1) / threads; i++) content(mem + i * PAGE, seed_of(i));
  return NULL;
}

static void *check_part(void *arg) {
  size_t k = (size_t)arg, blocks = pages / BLOCK;
  struct rng g = {k + 1};
  size_t from = blocks * k / threads, n = blocks * (k + 1) / threads - from;
  size_t *order = malloc(n * sizeof *order + 1);
  must(order, "malloc");
  for (size_t i = 0; i < n; i++) order[i] = from + i;
  for (int pass = 0; pass < passes; pass++) {
    for (size_t i = n; i > 1; i--) {
      size_t j = below(&g, i), b = order[j];
      order[j] = order[i - 1];
      order[i - 1] = b;
    }
    for (size_t i = 0; i < n; i++)
      for (size_t j = order[i] * BLOCK; j < (order[i] + 1) * BLOCK; j++) check(mem + j * PAGE, seed_of(j), "memory", j);
  }
  free(order);
  return NULL;
}

// in_parts runs f for each thread's part.
static void in_parts(void *(*f)(void *)) {
  pthread_t t[MAXTHREADS];
  for (size_t k = 1; k < threads; k++) must(!pthread_create(&t[k], NULL, f, (void *)k), "pthread_create");
  f((void *)0);
  for (size_t k = 1; k < threads; k++) must(!pthread_join(t[k], NULL), "pthread_join");
}

static void make(size_t mib) {
  if (mem) fail("there is memory already");
  pages = mib * 256;
  mem = map_or_die(pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
}

// read_pipe gets all memory through a pipe.
static void read_pipe(void) {
  static uint8_t b[8 * PAGE];
  int fd[2];
  must(!pipe(fd), "pipe");
  for (size_t i = 0; i < pages; i += 8) {
    for (size_t k = 0; k < 8; k++) content(b + k * PAGE, seed_of(i + k));
    must(write(fd[1], b, sizeof b) == sizeof b && read(fd[0], mem + i * PAGE, sizeof b) == sizeof b, "pipe");
  }
  must(!close(fd[0]) && !close(fd[1]), "pipe");
}

// ---- files ---------------------------------------------------------------------------

static size_t files;

static void file_name(char *name, size_t n, size_t f) { snprintf(name, n, "/tmp/pressure-%zu", f); }

static uint64_t file_seed(size_t f, size_t i) { return (f * FILEPAGES + i) * 16 + 15; }

static void write_file(size_t f) {
  static uint8_t b[BLOCK * PAGE];
  char name[64];
  file_name(name, sizeof name, f);
  int fd = open(name, O_WRONLY | O_CREAT | O_EXCL, 0600);
  must(fd >= 0, name);
  for (size_t i = 0; i < FILEPAGES; i += BLOCK) {
    for (size_t k = 0; k < BLOCK; k++) content(b + k * PAGE, file_seed(f, i + k));
    must(write(fd, b, sizeof b) == sizeof b, name);
  }
  must(!close(fd), name);
}

static void check_file(size_t f) {
  static uint8_t b[BLOCK * PAGE];
  char name[64];
  file_name(name, sizeof name, f);
  int fd = open(name, O_RDONLY);
  must(fd >= 0, name);
  for (size_t i = 0; i < FILEPAGES; i += BLOCK) {
    must(read(fd, b, sizeof b) == sizeof b, name);
    for (size_t k = 0; k < BLOCK; k++) check(b + k * PAGE, file_seed(f, i + k), name, i + k);
  }
  must(!close(fd), name);
}

static void check_files(void) {
  struct rng g = {3};
  size_t *order = malloc(files * sizeof *order + 1);
  must(order, "malloc");
  for (size_t f = 0; f < files; f++) order[f] = f;
  for (int pass = 0; pass < 2; pass++) {
    for (size_t i = files; i > 1; i--) {
      size_t j = below(&g, i), f = order[j];
      order[j] = order[i - 1];
      order[i - 1] = f;
    }
    for (size_t i = 0; i < files; i++) check_file(order[i]);
  }
  free(order);
}

// ---- children --------------------------------------------------------------------------

static void child(uint64_t k, uint64_t n) {
  must(!prctl(PR_SET_PDEATHSIG, SIGKILL), "prctl");
  threads = passes = 1;
  // All see the parent's memory as it was.
  check_part((void *)0);
  own = k;
  own_from = pages * (k - 1) / n;
  own_to = pages * k / n;
  for (size_t i = own_from; i < own_to; i++) content(mem + i * PAGE, seed_of(i));
  check_part((void *)0);
  _exit(0);
}

static void fork_children(uint64_t n) {
  if (n > 14) fail("at most 14 children");
  pid_t pid[14];
  for (uint64_t k = 0; k < n; k++) {
    pid[k] = fork();
    must(pid[k] >= 0, "fork");
    if (!pid[k]) child(k + 1, n);
  }
  for (uint64_t k = 0; k < n; k++) {
    int status;
    must(waitpid(pid[k], &status, 0) == pid[k], "waitpid");
    if (status) fail("child %llu ended with status %#x", (unsigned long long)k, status);
  }
}

int main(void) {
  prog_name = "pressure";
  threads = 1;
  make_words();
  setvbuf(stdout, NULL, _IOLBF, 0);
  puts("READY");
  char line[64];
  while (fgets(line, sizeof line, stdin)) {
    unsigned long long mib, n;
    if (sscanf(line, "fill %llu %llu", &mib, &n) == 2 && n >= 1 && n <= MAXTHREADS) {
      make(mib);
      threads = n;
      in_parts(fill_part);
    } else if (sscanf(line, "read %llu", &mib) == 1) {
      make(mib);
      threads = 1;
      read_pipe();
    } else if (!strcmp(line, "again\n")) {
      generation++;
      in_parts(fill_part);
    } else if (sscanf(line, "files %llu", &mib) == 1) {
      for (size_t end = files + mib; files < end; files++) write_file(files);
    } else if (sscanf(line, "random %llu", &mib) == 1) {
      uint8_t *p = map_or_die(mib * 256, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
      for (size_t i = 0; i < mib * 256; i++) gen_random(p + i * PAGE, PAGE, mix(i) | 1);
    } else if (sscanf(line, "fork %llu", &n) == 1) {
      fork_children(n);
    } else if (!strcmp(line, "verify\n")) {
      in_parts(check_part);
      check_files();
    } else if (!strcmp(line, "quit\n")) {
      return 0;
    } else {
      fail("unknown request %s", line);
    }
    puts("OK");
  }
  return 0;
}
