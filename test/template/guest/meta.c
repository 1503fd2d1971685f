// meta executes a random but reproducible sequence of operations on memory:
// stores, loads, forks, mmap, munmap, mremap, mprotect, madvise and files in
// tmpfs, in several processes. What it does depends on the seed alone, so two
// runs have the same memory after the same number of operations, whatever
// happened to that memory in between.
//
//   meta --seed=1 --mb=32
//
// Requests: "run N" does N more operations and prints how many there were and a
// digest of all that was read on the way, "digest" prints a digest of all memory
// of all processes, "quit".

#include "guest.h"

#include <sys/prctl.h>

#define RW (PROT_READ | PROT_WRITE)
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)
#define MAXMAP 40
#define MAXFILE 6
#define MAXKIDS 3

static struct map {
  uint8_t *base;
  size_t n;      // pages; 0: not in use
  int shared;    // other processes may have it
  int of_file;   // a private mapping of a file
  int readonly;
  int dead[64];  // parts of it that were unmapped, in sixteenths
} maps[MAXMAP];

static struct {
  int fd;
  size_t n;  // pages
} files[MAXFILE];

static struct kid {
  pid_t pid;
  int down, up;
} kids[MAXKIDS];

static struct rng g;
static uint64_t seen;      // digest of what was read
static uint64_t ops;
static size_t budget;      // pages that may be mapped
static int generation;     // of the process: children of children have fewer

static void see(uint64_t v) { seen = mix(seen ^ v) + ops; }

static uint64_t hash_page(const void *p) {
  const uint64_t *w = p;
  uint64_t h = 1469598103934665603ULL;
  for (size_t j = 0; j < PAGE / 8; j++) h = (h ^ w[j]) * 1099511628211ULL;
  return h;
}

// alive tells whether a page of a map was not unmapped.
static int alive(const struct map *m, size_t i) { return !m->dead[i * 64 / m->n]; }

static void content(uint8_t *p) {
  uint64_t h = rnd(&g);
  switch (below(&g, 6)) {
    case 0:
      gen_random(p, PAGE, h | 1);
      break;
    case 1:
    case 2:
      gen_text(p, PAGE, h);
      break;
    case 3:
      gen_words(p, PAGE, h);
      break;
    case 4:
      memset(p, h & 1 ? 0 : h & 0xff, PAGE);
      break;
    case 5:
      for (int i = 0; i < 6; i++) {
        h = mix(h);
        memcpy(p + h % 512 * 8, &h, 8);
      }
  }
}

static size_t mapped(void) {
  size_t n = 0;
  for (int i = 0; i < MAXMAP; i++) n += maps[i].n;
  return n;
}

static struct map *any_map(void) {
  for (int k = 0; k < 100; k++) {
    struct map *m = &maps[below(&g, MAXMAP)];
    if (m->n) return m;
  }
  return NULL;
}

static void op_mmap(void) {
  size_t n = 16 + below(&g, 8) * 16;
  if (below(&g, 8) == 0) n = 512 + below(&g, 3) * 256;
  int slot = -1, kind = below(&g, 8);
  for (int i = 0; i < MAXMAP; i++)
    if (!maps[i].n) slot = i;
  if (slot < 0 || mapped() + n > budget) return;
  struct map *m = &maps[slot];
  memset(m, 0, sizeof *m);
  int file = below(&g, MAXFILE);
  if (kind < 5) {
    m->base = mmap(NULL, n * PAGE, RW, ANON | (kind == 4 ? MAP_POPULATE : 0), -1, 0);
  } else if (kind == 5) {
    m->base = mmap(NULL, n * PAGE, RW, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    m->shared = 1;
  } else {
    if (n > files[file].n) n = files[file].n;
    if (n < 16) return;
    m->base = mmap(NULL, n * PAGE, RW, kind == 6 ? MAP_SHARED : MAP_PRIVATE, files[file].fd, 0);
    m->shared = kind == 6;
    m->of_file = kind == 7;
    if (m->of_file) {
      // What of a private mapping follows the file is nobody's business to say:
      // make all of it our own at once.
      for (size_t i = 0; m->base != MAP_FAILED && i < n; i++) {
        volatile uint8_t *p = m->base + i * PAGE;
        *p = *p;
      }
    }
  }
  must(m->base != MAP_FAILED, "mmap");
  m->n = n;
}

static void op_munmap(struct map *m) {
  if (m->n && below(&g, 3) == 0) {
    // Not what was unmapped before: there may be something else by now.
    for (size_t i = 0, k; i < m->n; i = k + 1) {
      for (k = i; k < m->n && alive(m, k); k++) {
      }
      if (k > i) must(munmap(m->base + i * PAGE, (k - i) * PAGE) == 0, "munmap");
    }
    m->n = 0;
    return;
  }
  if (m->n % 64 || m->shared) return;
  size_t part = below(&g, 64), each = m->n / 64;
  must(munmap(m->base + part * each * PAGE, each * PAGE) == 0, "munmap");
  m->dead[part] = 1;
}

static void op_mremap(struct map *m) {
  for (int i = 0; i < 64; i++)
    if (m->dead[i]) return;
  if (m->shared) return;
  size_t n = m->n;
  if (!m->of_file && below(&g, 2)) n = 16 + below(&g, 2 * m->n) / 16 * 16;
  if (mapped() - m->n + n > budget) return;
  uint8_t *to = mmap(NULL, n * PAGE, PROT_NONE, ANON | MAP_NORESERVE, -1, 0);
  must(to != MAP_FAILED, "mmap");
  must(mremap(m->base, m->n * PAGE, n * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to, "mremap");
  m->base = to;
  m->n = n;
}

static void op_file(void) {
  uint8_t b[PAGE];
  int f = below(&g, MAXFILE);
  size_t i = below(&g, files[f].n);
  switch (below(&g, 5)) {
    case 0:
    case 1:
      memset(b, 0, sizeof b);
      content(b);
      must(pwrite(files[f].fd, b, PAGE, i * PAGE) == (ssize_t)PAGE, "pwrite");
      break;
    case 2:
    case 3:
      must(pread(files[f].fd, b, PAGE, i * PAGE) == (ssize_t)PAGE, "pread");
      see(hash_page(b));
      break;
    case 4: {
      // Shorter and back: what was cut off reads as zeros. Not below what is
      // mapped, where that would be a SIGBUS meanwhile.
      struct stat st;
      must(fstat(files[f].fd, &st) == 0, "fstat");
      see(st.st_size);
      must(ftruncate(files[f].fd, (files[f].n + 1 + below(&g, 20)) * PAGE) == 0, "ftruncate");
      must(ftruncate(files[f].fd, files[f].n * PAGE) == 0, "ftruncate");
    }
  }
}

static void line_to(int fd, const char *s) { must(write(fd, s, strlen(s)) == (ssize_t)strlen(s), "write to a process"); }

static int line_from(int fd, char *buf, size_t n) {
  size_t k = 0;
  while (k + 1 < n) {
    ssize_t r = read(fd, buf + k, 1);
    if (r < 0 && errno == EINTR) continue;
    must(r >= 0, "read");
    if (r == 0) return 0;
    if (buf[k] == '\n') break;
    k++;
  }
  buf[k] = 0;
  return 1;
}

static void serve(int in, int out);

// ask_kid has a child do something and sees the answer.
static void ask_kid(struct kid *k, const char *req, char *out, size_t n) {
  line_to(k->down, req);
  if (!line_from(k->up, out, n)) fail("a process of generation %d is gone", generation + 1);
  if (strncmp(out, "OK", 2)) fail("a child says: %.200s", out);
}

static void op_fork(void) {
  struct kid *k = &kids[below(&g, MAXKIDS)];
  char req[64], rep[256];
  if (k->pid) {
    if (below(&g, 4)) {
      snprintf(req, sizeof req, "run %d\n", (int)below(&g, 20));
      ask_kid(k, req, rep, sizeof rep);
      see(strtoull(strrchr(rep, ' '), NULL, 16));
      return;
    }
    ask_kid(k, "digest\n", rep, sizeof rep);
    see(strtoull(strrchr(rep, ' '), NULL, 16));
    close(k->down);
    close(k->up);
    int st;
    must(waitpid(k->pid, &st, 0) == k->pid && st == 0, "a child's end");
    k->pid = 0;
    return;
  }
  if (generation >= 2) return;
  int d[2], u[2];
  must(pipe(d) == 0 && pipe(u) == 0, "pipe");
  uint64_t s = rnd(&g);
  pid_t pid = fork();
  must(pid >= 0, "fork");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    // The siblings are its parent's.
    for (int i = 0; i < MAXKIDS; i++)
      if (kids[i].pid) {
        close(kids[i].down);
        close(kids[i].up);
        kids[i].pid = 0;
      }
    close(d[1]);
    close(u[0]);
    generation++;
    g.s = s;
    serve(d[0], u[1]);
    _exit(0);
  }
  close(d[0]);
  close(u[1]);
  *k = (struct kid){pid, d[1], u[0]};
}

static void step(void) {
  ops++;
  struct map *m = any_map();
  int what = below(&g, 40);
  if (!m || what < 3) {
    op_mmap();
    return;
  }
  size_t i = below(&g, m->n);
  uint8_t *p = m->base + i * PAGE;
  if (what < 15) {
    if (!alive(m, i)) return;
    if (m->readonly) {
      see(hash_page(p));
    } else if (below(&g, 2)) {
      content(p);
    } else {
      *(volatile uint64_t *)(p + below(&g, 512) * 8) = rnd(&g);
    }
  } else if (what < 24) {
    if (alive(m, i)) see(hash_page(p));
  } else if (what < 26) {
    // A run of pages, through the kernel.
    size_t n = 1 + below(&g, 40);
    for (size_t k = 0; k < n && i + k < m->n; k++)
      if (alive(m, i + k)) {
        uint8_t b[PAGE];
        int fd[2];
        must(pipe(fd) == 0, "pipe");
        must(write(fd[1], p + k * PAGE, PAGE) == (ssize_t)PAGE && read(fd[0], b, PAGE) == (ssize_t)PAGE, "pipe");
        see(hash_page(b));
        if (!m->readonly && below(&g, 2)) {
          content(b);
          must(write(fd[1], b, PAGE) == (ssize_t)PAGE && read(fd[0], p + k * PAGE, PAGE) == (ssize_t)PAGE, "pipe");
        }
        close(fd[0]);
        close(fd[1]);
      }
  } else if (what < 28) {
    // A private mapping of a file would follow the file again.
    if (!alive(m, i) || m->of_file) return;
    must(madvise(p, PAGE, MADV_DONTNEED) == 0, "madvise");
    see(hash_page(p));
  } else if (what < 29) {
    op_munmap(m);
  } else if (what < 31) {
    op_mremap(m);
  } else if (what < 32) {
    for (int k = 0; k < 64; k++)
      if (m->dead[k]) return;
    m->readonly = !m->readonly;
    must(mprotect(m->base, m->n * PAGE, m->readonly ? PROT_READ : RW) == 0, "mprotect");
  } else if (what < 36) {
    op_file();
  } else {
    op_fork();
  }
}

static uint64_t digest(void) {
  uint64_t h = mix(ops ^ g.s);
  for (int k = 0; k < MAXMAP; k++)
    for (size_t i = 0; i < maps[k].n; i++)
      if (alive(&maps[k], i)) h = mix(h ^ hash_page(maps[k].base + i * PAGE)) + k;
  for (int f = 0; f < MAXFILE; f++)
    for (size_t i = 0; i < files[f].n; i++) {
      uint8_t b[PAGE];
      must(pread(files[f].fd, b, PAGE, i * PAGE) == (ssize_t)PAGE, "pread");
      h = mix(h ^ hash_page(b)) + f;
    }
  for (int k = 0; k < MAXKIDS; k++)
    if (kids[k].pid) {
      char rep[256];
      ask_kid(&kids[k], "digest\n", rep, sizeof rep);
      h = mix(h ^ strtoull(strrchr(rep, ' '), NULL, 16)) + k;
    }
  return mix(h ^ seen);
}

static void serve(int in, int out) {
  char req[128], rep[256];
  while (line_from(in, req, sizeof req)) {
    if (!strncmp(req, "run ", 4)) {
      for (long n = atol(req + 4); n > 0; n--) step();
      snprintf(rep, sizeof rep, "OK run %llu %016llx\n", (unsigned long long)ops, (unsigned long long)seen);
    } else if (!strcmp(req, "digest")) {
      snprintf(rep, sizeof rep, "OK digest %016llx\n", (unsigned long long)digest());
    } else if (!strcmp(req, "quit")) {
      break;
    } else {
      fail("unknown request %s", req);
    }
    line_to(out, rep);
  }
  // Those below see the end of their input.
  for (int k = 0; k < MAXKIDS; k++)
    if (kids[k].pid) {
      close(kids[k].down);
      waitpid(kids[k].pid, NULL, 0);
    }
}

int main(int argc, char **argv) {
  prog_name = "meta";
  g.s = opt_num(argc, argv, "seed", 1);
  budget = opt_num(argc, argv, "mb", 32) * 256;
  install_fault_handlers();
  for (int f = 0; f < MAXFILE; f++) {
    char path[64];
    snprintf(path, sizeof path, "%s/meta-%d", f % 2 ? "/dev/shm" : "/var", f);
    files[f].fd = f < 2 ? (int)syscall(SYS_memfd_create, "meta", 0) : open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    must(files[f].fd >= 0 && (f < 2 || unlink(path) == 0), path);
    files[f].n = 64 + below(&g, 4) * 64;
    must(ftruncate(files[f].fd, files[f].n * PAGE) == 0, "ftruncate");
  }
  must(write(1, "READY\n", 6) == 6, "write");
  serve(0, 1);
  return 0;
}
