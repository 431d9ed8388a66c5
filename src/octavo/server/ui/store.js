// What this browser keeps: conversations in IndexedDB, settings in localStorage. Nothing is sent anywhere.

const opened = new Promise((resolve, reject) => {
  const asked = indexedDB.open("octavo", 1);
  asked.onupgradeneeded = () => asked.result.createObjectStore("chats", { keyPath: "id" });
  asked.onsuccess = () => resolve(asked.result);
  asked.onerror = () => reject(asked.error);
});

async function run(mode, work) {
  const transaction = (await opened).transaction("chats", mode);
  return new Promise((resolve, reject) => {
    const asked = work(transaction.objectStore("chats"));
    transaction.commit(); // not only once this is answered: the page may be left before
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

export const all = async () => (await run("readonly", (chats) => chats.getAll())).sort((a, b) => b.updated - a.updated);
export const save = (chat) => run("readwrite", (chats) => chats.put(chat));
export const remove = (chat) => run("readwrite", (chats) => chats.delete(chat.id));

export function recall(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`octavo.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

export const remember = (name, value) => localStorage.setItem(`octavo.${name}`, JSON.stringify(value));
